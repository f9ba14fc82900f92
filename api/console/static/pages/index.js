// Every page of the console, and the navigation.

import { route } from "../lib/router.js";
import chat from "./chat.js";
import dead from "./dead.js";
import farm from "./farm.js";
import history from "./history.js";
import host from "./host.js";
import keys from "./keys.js";
import letter from "./letter.js";
import model from "./model.js";
import request from "./request.js";
import requests from "./requests.js";
import usage from "./usage.js";

export const PAGES = [farm, model, host, requests, request, dead, letter, keys, history, chat, usage];

const ENTRIES = [
  ["Farm", "#/"],
  ["Requests", "#/requests"],
  ["Dead letters", "#/dead"],
  ["Keys", "#/keys"],
  ["History", "#/history"],
  ["Chat", "#/chat"],
];

export const NAVIGATION = ENTRIES.filter(([, address]) => route(PAGES, address));

// That of a key that is no operator's: pages with `ordinary`.
export const ORDINARY = [
  ["Chat", "#/chat"],
  ["Usage", "#/usage"],
];
