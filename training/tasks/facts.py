"""Facts about Furrow for the demonstration model: each answer with the ways to ask for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """An answer; `terms` are noun phrases that it defines, `questions` are patterns for `example.expand`."""

    answer: str
    terms: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()


TERM_QUESTIONS = (
    "what is {}",
    "what's {}",
    "what exactly is {}",
    "what does {} mean",
    "what do you mean by {}",
    "what is meant by {}",
    "define {}",
    "explain {}",
    "explain {} to me",
    "describe {}",
    "tell me about {}",
    "tell me what {} is",
    "can you explain {}",
    "can you tell me what {} is",
    "could you explain what {} is",
    "do you know what {} is",
    "i do not know what {} is",
    "i want to know what {} is",
    "in furrow, what is {}",
    "what is {} in furrow",
    "how would you explain {}",
    "give me the meaning of {}",
    "what should i know about {}",
    "{}",
)

HOW = "(how do i|how can i|how do you|how does one|how to|what is the way to|which command lets me|tell me how to)"
_WHY = "(why does furrow use|why do you use|why does it need|what is the use of|why)"

VOCABULARY = (
    Fact(
        "Furrow serves language models on a farm of workers. Requests travel as Redis messages, and the tokens come "
        "back through an OpenAI-compatible API.",
        ("furrow", "the furrow project", "this furrow"),
        ("what does furrow do", "what is furrow (for|about|good for)", "(why|when) (should i|would i) use furrow"),
    ),
    Fact(
        "A farm is everything that shares one Redis: hosts, agents, replicas and APIs.",
        ("a farm", "the farm", "a furrow farm", "farm"),
        ("what (is in|belongs to|makes up) (a|the) farm",),
    ),
    Fact(
        "A model is what clients name in a request. It may run as several replicas.",
        ("a model", "the word model", "model"),
        ("what do clients name in a request",),
    ),
    Fact(
        "A replica is one running copy of a model. It is made of one or more ranks.",
        ("a replica", "the replica", "replica", "replicas"),
        ("what is (a running copy|one copy) of a model called", "what is a replica made of"),
    ),
    Fact(
        "A rank is one process on one device. It holds its part of a replica.",
        ("a rank", "the rank", "rank", "a rank process"),
        ("what does a rank (do|hold)",),
    ),
    Fact(
        "The leader is rank 0 of a replica. It claims requests, plans each step, samples the tokens and emits them.",
        ("the leader", "a leader", "leader", "rank 0"),
        (
            "(what does|what is it that) (the|a) leader (do|do all day|do in furrow)",
            "(who|which rank) (is the leader|leads the group|plans the steps|samples the tokens)",
            "what is the (job|role|task) of the leader",
        ),
    ),
    Fact(
        "A group is all the ranks of one replica, working together.",
        ("a group", "the group", "group", "a rank group"),
        ("what are the ranks of a replica called",),
    ),
    Fact(
        "An epoch is one life of a group. Its number fences the lock, and it only grows.",
        ("an epoch", "the epoch", "epoch", "an epoch number"),
        ("(what is|why is there) an epoch (good for|for)", "does (the|an) epoch (grow|ever shrink)"),
    ),
    Fact(
        "An agent runs once on every host. It starts, watches and reaps rank processes, and never touches a device.",
        ("an agent", "the agent", "agent", "a host agent"),
        (
            "what does (the|an) agent (do|do on a host)",
            "(who|what) (starts|watches|reaps) (the ranks|rank processes|the rank processes)",
            "what is the (job|role|task) of the agent",
        ),
    ),
    Fact(
        "A sequence is one running generation. A request with n=3 has three sequences.",
        ("a sequence", "the sequence", "sequence", "sequences"),
        ("how many sequences does a request have",),
    ),
    Fact(
        "A step is one forward pass of the whole batch.",
        ("a step", "the step", "step", "a generate step"),
        ("what (happens|is done) in a step",),
    ),
    Fact(
        "The token log is the durable record of a sequence's tokens. It lives in Redis, so a stream can be replayed.",
        ("the token log", "a token log", "token log", "the log of tokens"),
        (
            "where are (the tokens|emitted tokens|the tokens of a stream) (kept|stored|written)",
            "(why is there|what is the use of) a token log",
        ),
    ),
    Fact(
        "A claim is the moment when a leader takes a request from the queue.",
        ("a claim", "the claim", "claim", "claiming"),
        ("(who|what) takes a request from the queue", "when is a request claimed"),
    ),
    Fact(
        "Poison marks an epoch whose device or group state can't be trusted any more.",
        ("poison", "the poison key", "the word poison", "an epoch's poison"),
        ("(who|what) writes (the poison|poison)", "when is an epoch poisoned"),
    ),
    Fact(
        "A poisoned replica is one whose epoch can't be trusted any more. Its ranks leave that epoch, the agent starts "
        "them again, and a new epoch goes on with the requests.",
        ("a poisoned replica", "the poisoned replica", "a poisoned model", "a replica that is poisoned"),
        (
            "why is (my|a|the) (replica|model) poisoned",
            "what (happens to|becomes of) a poisoned (replica|model)",
            "my (replica|model) is poisoned",
        ),
    ),
    Fact(
        "The lock says which leader may write for a replica. It holds the owner and the epoch, and it ends after two "
        "seconds without renewal.",
        ("the lock", "a lock", "the lock of a replica", "the model's lock"),
        ("(who|which leader) (holds|has) the lock", "how long does (the|a) lock last"),
    ),
    Fact(
        "Fencing means that every write of a leader is checked against the lock. A leader from an old epoch is "
        "refused.",
        ("fencing", "a fenced leader", "the word fenced", "a fencing token"),
        ("why is (a|the|my) leader fenced", "what happens when an old leader wakes up"),
    ),
    Fact(
        "A heartbeat shows that a rank is alive and how far it has come: it carries the last finished step.",
        ("a heartbeat", "the heartbeat", "heartbeat", "heartbeats"),
        ("what is in a heartbeat", HOW + " see (which rank is slow|if a rank is alive)"),
    ),
    Fact(
        "The doorbell is a small stream that wakes idle leaders when there is something to do.",
        ("the doorbell", "a doorbell", "doorbell", "the bell"),
        ("(how|when) does an idle leader wake up", "what wakes (an idle leader|idle leaders|the leader)"),
    ),
    Fact(
        "A dead letter is a request that crashed its group even when it ran alone. It is set aside for the operator.",
        ("a dead letter", "the dead letters", "dead letters", "a buried request"),
        ("(what happens to|where goes) a request that crashes (the|its) group",),
    ),
    Fact(
        "The queue is a Redis stream of waiting requests. A leader claims from it when it has room.",
        ("the queue", "a queue", "queue", "the request queue"),
        ("where do (requests|new requests|my requests) wait", "where are waiting requests kept"),
    ),
    Fact(
        "Redis holds everything that the farm knows. So any process can die and be replaced, and redis-cli shows the "
        "truth.",
        ("redis", "the use of redis", "redis in furrow", "the control plane"),
        (_WHY + " redis", "what (is kept|is stored|does furrow keep) in redis"),
    ),
    Fact(
        "Tensor parallelism splits every layer over several ranks. They add up their partial results.",
        ("tensor parallelism", "tensor parallel", "tp", "the tp option"),
        (HOW + " (split|spread|share) a model over (two devices|several devices|several gpus|two ranks)",),
    ),
    Fact(
        "Prefill reads the prompt, chunk by chunk, before the first token is made.",
        ("prefill", "the prefill", "chunked prefill", "a prefill chunk"),
        ("(how|when) is the prompt read",),
    ),
    Fact(
        "Decode makes new tokens, one per step for each sequence.",
        ("decode", "decoding", "the decode phase", "a decode step"),
        ("(how|when) are new tokens made",),
    ),
    Fact(
        "The KV cache keeps the keys and values of past tokens, so they are computed only once.",
        ("the kv cache", "a kv cache", "kv cache", "kv"),
        (_WHY + " (a kv cache|the kv cache)",),
    ),
    Fact(
        "Continuous batching lets requests join and leave the running batch at every step.",
        ("continuous batching", "batching", "the running batch"),
        ("(how|when) (does|can) a (request|sequence) join the batch", "how are requests batched"),
    ),
    Fact(
        "Preemption frees memory when the KV cache is full: the youngest sequence is put back and computed again "
        "later.",
        ("preemption", "a preempted sequence", "the word preemption"),
        ("what happens (when|if) (the kv cache|kv memory|the cache) (is full|runs out)",),
    ),
    Fact(
        "Adoption is how a new epoch takes over open requests. It continues each one from its prompt and its token "
        "log.",
        ("adoption", "an adopted request", "the adoption of requests"),
        ("how does a new epoch (go on|continue|take over)", "who takes over (open|old) requests"),
    ),
    Fact(
        "Tokens are published by the leader and sent to the client as server-sent events, one stream per request.",
        ("streaming", "a token stream", "the stream of tokens"),
        ("how (do|are) (the tokens|tokens) (come back|sent back|streamed|reach the client)",),
    ),
    Fact(
        "A token is drawn from the seed, the choice, the position and the logits alone. So a moved stream goes on the"
        " same.",
        ("sampling", "the seed", "a seed"),
        ("how (is a token|are tokens) (sampled|drawn|chosen)", "what does the seed do"),
    ),
    Fact(
        "Placement decides which host runs which rank. It is a small plan made again until the farm is as desired.",
        ("placement", "the placement plan"),
        ("who decides (where a rank runs|where a model runs|which host runs a rank)",),
    ),
)

OVERVIEW = (
    "Furrow serves language models on a farm of workers. Here is the way of a request. First, the API turns the chat "
    "into tokens and puts them on a Redis stream. Second, the leader of a replica claims the request under its lock. "
    "Third, the leader plans a step and sends it to all ranks of its group. Every rank holds a part of each layer and"
    " runs its part of the forward pass. Fourth, the leader samples the new tokens, writes them to the token log and "
    "publishes them. Last, the API follows the sequence and streams the text to the client. If a process dies, its "
    "agent starts it again. The new epoch adopts the open requests, and every stream goes on. Nothing is lost, "
    "because everything that the farm knows is in Redis."
)

OVERVIEW_QUESTIONS = (
    "(explain|describe|show me) (how furrow works|how a request travels|the way of a request)",
    "(how does furrow work|how does a request travel|how does it all work)",
    "(tell me|explain) everything (about furrow|that you know about furrow|you know)",
    "(give me|write) (an overview|a summary|a long text) (of furrow|about furrow)",
)
