"""One request in Redis: its id, queue, turn, claim, emitted tokens, log, followers, repair, and end, also as a dead
letter."""

from __future__ import annotations

from control.requests.claim import (
    ANY_TOKENS,
    Adopted,
    Claimed,
    Claims,
    Inheritance,
    adopt,
    claim,
    inherit,
    note_suspects,
    read_dockets,
    takeover,
)
from control.requests.ending import bury, cancel, expire, requeue
from control.requests.enqueue import (
    ANY_BYTES,
    Enqueue,
    Enqueued,
    ImageBounds,
    Pieces,
    enqueue,
    enqueue_again,
    member_rid,
    new_rid,
    pieces_of,
    read_image,
    stage_images,
)
from control.requests.follow import Followed, QueuePlace, follow, places, position, unfollow
from control.requests.repair import Repaired, repair
from control.requests.token_log import (
    PAGE_ENTRIES,
    Emission,
    EmitResult,
    aread_pages,
    emit,
    emit_all,
    merged,
    read_log,
    read_pages,
    read_params,
)
from control.requests.upkeep.counts import recount
from control.requests.upkeep.dead import DeadLetter, dead_letter, dead_letters, drop_letter, retry_letter
from control.requests.upkeep.running import OpenRequest, cancel_any, open_requests
from control.requests.upkeep.stranded import Reaped, gone_apis, reap, reap_all, take_round
