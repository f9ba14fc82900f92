"""Life times, stream lengths and limits that scripts and processes share."""

from __future__ import annotations

LOCK_MS = 2_000
"""Life of a replica's lock; renewed every quarter of it."""
HEARTBEAT_MS = 2_000
"""Life of a host's and an API's heartbeat; beaten every quarter of it."""
ROUND_MS = 900
"""Life of the right to do what one API process does for all. Each tries once a second; a lone one always gets it."""
OVERVIEWS_MS = 3_000
"""Life of the overviews that one API process read for all."""
RANK_BEAT_MS = 1_500
"""Life of a rank's heartbeat: with what its agent takes to look, a rank that hangs is found within 2 s."""
MEETING_MS = 180_000
"""Of what ranks tell each other while they form a group; longer than one waits for another."""
COMMAND_MS = 60_000
"""Life of an epoch's command and reply streams, refreshed by each renewal of the lock."""
COMMAND_LENGTH = 1_024
"""Entries kept in a command or reply stream."""
BELL_LENGTH = 128
POISONS_LENGTH = 64
EPOCHS_LENGTH = 64
DEAD_LENGTH = 1_000
SUSPECTS_MS = 86_400_000
"""Life of a model's docket; as long as a request may live, and removed long before."""
TRIAL_MS = 60_000
"""Life of the right to try the suspects of replicas that were given up; renewed with each step of a trial."""
MEMORY_DEATHS_MS = 600_000
"""Time for which the death of a rank for lack of memory counts."""
MEMORY_DEATHS_LENGTH = 64
END_REASON_MS = 3_600_000
"""Life of a rank process's reason for its end; its agent reads it at once, or after an outage of Redis."""
RETENTION_MS = 120_000
"""Time for which a request can be read after its end."""
ASSETS_LEFT_MS = 2 * RETENTION_MS
"""Time for which an unloaded model's assets stay: the texts of answers that ended before are made with them."""
LOOK_AFTER_MS = 20_000
"""The time between two looks at a stored response that has not ended; well below the retention, or its end is lost."""

RESPONSE_OVERHEAD = 512
"""Bytes that a stored response is taken to need beside its fields."""

SPENT_MS = 86_400_000
"""Life of what a request took of its API key's limits, and of its settlement, where no process applies that."""
SETTLE_TOKENS = 256
"""A request that runs is settled each time that it has made so many tokens more."""
USAGE_MS = 400 * 86_400_000
"""Time for which a day's usage can be read."""

CHOICE_TOKENS = 64
"""Prompt tokens that each further choice of a request is charged at most: it begins with what the first computed."""

PASSED_OVER = 16
"""So many claims in a row may pass over a class that waits; the next one is its own."""
STAGED_MS = 60_000
"""Life of a token log that is being written beside the one in use, refreshed by each page."""
HAND_OUT = 10
"""Requests that one script hands out, puts back or ends at most: one to two milliseconds of the server's time."""
HAND_OUT_CHOICES = 128
"""Choices after whose end a script ends no further request: each takes a log entry, and its part of an event."""
PLACES = 256
"""Waiting requests whose places one call of a script tells: less than a millisecond of the server's time."""
DEBT_MS = 600_000
"""Time for which a tenant without requests keeps its service beyond its turn."""
