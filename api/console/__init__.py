"""The console at /console: its files, plain HTML, CSS and ES modules, and the route that serves them.

It acts through the operators' routes only, which call the same functions of control as the command `furrow`. While
anybody follows `GET /farm/events`, a task reads the farm once a second and gives all followers the same bytes. A key is
kept in the tab and sent as a header, which no other site can add; there is no cookie. Texts of others are hidden
without `--console-text`: the right to restart a replica is not the right to read. Rejected were a bundler (nobody
reviews a bundle), Textual (a second interface) and WebSockets (proxies treat them apart).

`static/lib/` has what pages share, `static/pages/` a module for each page. There is no build step: browsers load the
files as they lie here. A page's module exports an object by default:

    export default {
      path: "/models/:model",          // the part of the address after `#`; `:name` is one part of it, decoded
      title: ({model}) => model,       // or a text; the title of the window
      nav: "Farm",                     // the entry of the navigation that is marked
      open(view) {                     // called once when the page is opened
        view.poll(5, async (api) => { known = await api.get("/farm/keys"); });
        return () => [h("h1", {}, "Keys"), …];   // draws the page; called after each snapshot and each poll
      },
    };

`view` (lib/view.js) has `params`, `query`, `api`, `farm` (the last snapshot and the plots), `poll`, `redraw`, `act`,
`ask` and `signal`, which ends with the page. What `open` returns draws the page as elements of lib/dom.js; the shell
carries the changes over into the document, so that focus and scrolling stay. A new page is listed in `pages/index.js`.
"""

from __future__ import annotations

from api.console.serving import console_routes
