"""Farms with one safety mechanism switched off, in which the checker must find broken streams.

`kinds` are the faults that then must do harm.
"""

from __future__ import annotations

from ops.common.sabotage import Sabotage

FRAIL = Sabotage(
    "a leader that feeds a prompt of one token, again and again, dies of a segmentation fault",
    "worker.engine.step",
    """
forward = module.Step.forward

def frail(step, *arguments):
    rows = step.command.change.rows
    if step.rank == 0 and any(len(row.tokens) >= 8 and set(row.tokens) == {11} for row in rows):
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)
    return forward(step, *arguments)

module.Step.forward = frail
""",
    ("crash-two-replicas",),
)
"""Not a control: it harms only the crashing request of these kinds."""

CONTROLS = {
    "no-seq-check": Sabotage(
        "emit appends and numbers whatever it is given, so that a repeat after a lost answer is in the log twice",
        "control.scripts",
        """
rewrite_scripts(
    module,
    ("elseif f[3] + 1 ~= seq or f[2] ~= 'running' then", "elseif false then"),
    (
        "local last = seq - 1\\n",
        "local last = tonumber(f[3])\\n"
        "for i = 1, count do\\n"
        "  entries[i] = string.gsub(entries[i], '^%[%d+', '[' .. whole(last + i))\\n"
        "end\\n",
    ),
)
""",
        ("drop-replies",),
    ),
    "no-replay": Sabotage(
        "a new epoch continues each request from its prompt alone, as if nothing had been produced",
        "worker.leader.request",
        """
replay = module.RunningRequest.replay

def forgetful(request, entries):
    replay(request, entries)
    for sequence in request.live:
        sequence.output.clear()

module.RunningRequest.replay = forgetful
""",
        ("leader-kill", "rank-kill"),
    ),
}
