// The console's beginning.

import { Farm } from "./lib/farm.js";
import { Shell } from "./lib/shell.js";
import { NAVIGATION, ORDINARY, PAGES } from "./pages/index.js";

const farm = new Farm();
new Shell(farm, PAGES, NAVIGATION, ORDINARY).open();
farm.start();
