"""Makes SGLang's server take the calls of one update's buckets in their order.

SGLang 0.5.23 serves a second /update_weights_from_distributed when the first has ended: both wait
for one lock, in the order in which their bodies arrive. With two connections this may differ from
the order of the buckets. So the trainer names the bucket, and a call waits for its turn before it
waits for the lock. Requests of other clients are unaffected.

    request   load_format "...+turn:INDEX"; the suffix is removed before SGLang reads it
"""

from __future__ import annotations

from typing import Any

TURN = "+turn:"
SERVER_INFO = "rlcore_bucket_turns"  # among the internal states of /server_info


def install(module: Any) -> None:
    """Wrap two methods of this process.

    Args:
        module: bucket_turns.py.
    """
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin as Manager

    turns = module.BucketTurns()
    begin = Manager.begin_weight_update
    update = Manager.update_weights_from_distributed

    async def begin_update(self: Any, *given: Any) -> Any:
        turns.begin()
        return await begin(self, *given)

    async def update_in_turn(self: Any, request: Any, *given: Any) -> Any:
        load_format, mark, index = (request.load_format or "").rpartition(TURN)
        if not mark:
            return await update(self, request, *given)
        request.load_format = load_format
        try:
            async with turns.take(int(index)) as taken:
                success, message = await update(self, request, *given)
                if not success:
                    taken.failed = int(index)
        except module.OutOfTurn as error:  # recovery: SGLang's form of a refusal
            return False, str(error)
        return success, message

    Manager.begin_weight_update = begin_update
    Manager.update_weights_from_distributed = update_in_turn
