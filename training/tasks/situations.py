"""Running Furrow, for the demonstration model: what happens when, and how to do things."""

from training.tasks.facts import HOW, Fact

_WHAT_IF = "(what happens|what happens to a stream|what does furrow do|what if|tell me what happens) (when|if|after)"
_DIES = "(dies|crashes|is killed|fails|stops|goes away|breaks)"

SITUATIONS = (
    Fact(
        "Use redis-cli: XLEN on the model's queue key counts the waiting requests. The file ops/redis-cli.md lists the "
        "keys.",
        (),
        (
            HOW + " (see|look at|inspect|show|check) (the queue|queued requests|what is queued|what is waiting)",
            "(how long is the queue|how many requests are waiting|how many requests are queued|is the queue long)",
        ),
    ),
    Fact(
        "When a leader dies, its agent starts the group again. The new epoch adopts the open requests, and every "
        "stream goes on.",
        (),
        (_WHAT_IF + " (the leader|a leader|my leader) " + _DIES,),
    ),
    Fact(
        "When a rank dies, its epoch is poisoned and the group leaves it. The agent starts the rank again, and every "
        "stream goes on.",
        (),
        (_WHAT_IF + " (the rank|a rank|one rank|a worker) " + _DIES,),
    ),
    Fact(
        "When Redis restarts, all clients connect again, and the leaders take their locks back. Every stream goes on.",
        (),
        (_WHAT_IF + " redis (restarts|dies|crashes|is killed|goes down|goes away|is restarted)",),
    ),
    Fact(
        "When an API process dies, the client asks any other one with Last-Event-ID. It resumes from the token log.",
        (),
        (_WHAT_IF + " (the api|an api|the api process|the api server) " + _DIES, HOW + " resume a (cut |)stream"),
    ),
    Fact(
        "Run furrow serve demo. It starts a private Redis, an agent, the ranks and the API.",
        ("furrow serve", "the serve command"),
        (HOW + " (start|run|launch|try) (furrow|the farm|a farm|the demo)",),
    ),
    Fact(
        "Run furrow models load with the name of the model. Add --tp 2 to use two ranks.",
        (),
        (HOW + " (load|add|start|deploy) (a model|another model|a new model|my model)",),
    ),
    Fact(
        "Run furrow models unload with the name of the model.",
        (),
        (HOW + " (unload|remove|drop|take away) (a model|the model|my model|one model)",),
    ),
    Fact(
        "Run furrow models list. It shows every model with its status.",
        (),
        (
            HOW + " (list|see) (the models|all models|loaded models|my models)",
            "(which|what) models (are loaded|are running|are there)",
        ),
    ),
    Fact(
        "When the queue is full, the API answers 429 with a Retry-After header.",
        ("status 429", "error 429", "the 429 error"),
        (_WHAT_IF + " (the queue is full|the farm is full|too many requests come)", "why do i get (a 429|429)"),
    ),
    Fact(
        "Close the connection, and the request is cancelled. Its slot is free after the running step.",
        ("cancel", "cancelling"),
        (HOW + " (cancel|stop|abort) (a request|my request|a stream|a running request)",),
    ),
    Fact(
        "No. Any process may be killed at any moment, and no token is lost, repeated or changed.",
        (),
        ("(can|will|may|could) (a token|tokens|any token|my tokens) (get lost|be lost|be repeated|change)",),
    ),
)
