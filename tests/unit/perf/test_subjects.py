"""Gradients that are renewed between two steps."""

import torch

from perf.subjects import Gradients


def test_new_gradients_lie_at_two_lists_of_addresses_in_turn() -> None:
    gradients, seen, tensors = Gradients([3, 5, 64]), [], set()
    for _ in range(6):
        held = [parameter.grad for parameter in gradients.parameters]
        assert torch.equal(torch.cat(held), gradients.values)
        assert all(map(torch.equal, held, gradients.locals))
        seen.append([grad.data_ptr() for grad in held])
        tensors |= {*held}
        torch._foreach_mul_(held, 0.5)
        gradients.renew()
    assert seen == [seen[0], seen[1]] * 3
    assert not {*seen[0]} & {*seen[1]}
    assert len(tensors) == 18
