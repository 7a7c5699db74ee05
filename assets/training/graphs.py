"""One training step as a CUDA graph: forward, backward, clipping and AdamW replayed in one launch.

A step is captured once for each input shape (its `key`). On the CPU the same step runs eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
# (key, inputs) -> (total loss, [K] parts for the log)
LossFunction = Callable[[Hashable, Inputs], tuple[Tensor, Tensor]]


class TrainingSteps:
    """Optimiser and captured steps of one phase."""

    def __init__(
        self,
        groups: list[tuple[Iterable[nn.Parameter], float]],
        loss: LossFunction,
        device: torch.device,
        num_parts: int,
    ) -> None:
        self._loss, self._device = loss, device
        self._is_cuda = device.type == "cuda"
        self._base_rates = [rate for _, rate in groups]
        self._rates = [torch.zeros((), device=device) for _ in groups]
        parameters = [list(parameters) for parameters, _ in groups]
        self._parameters = [parameter for group in parameters for parameter in group]
        self._optimizer = torch.optim.AdamW(
            [{"params": group, "lr": rate} for group, rate in zip(parameters, self._rates, strict=True)],
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=self._is_cuda,
            capturable=self._is_cuda,
        )
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._inputs: dict[Hashable, Inputs] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._sum = torch.zeros(num_parts, device=device)
        self.num_steps = 0
        self._logged = 0

    def set_progress(self, progress: float) -> None:
        """Learning rates at this part (0..1) of the phase: short warm-up, then a cosine to 2 %."""
        warm = min(1.0, progress / 0.03 + 0.01)
        factor = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        for rate, base in zip(self._rates, self._base_rates, strict=True):
            rate.fill_(base * factor)

    def _step(self, key: Hashable, inputs: Inputs) -> None:
        gradients = self._gradients
        torch._foreach_zero_(gradients)
        total, parts = self._loss(key, inputs)
        total.backward()
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.step()
        self._sum += parts.detach()

    def run(self, key: Hashable, inputs: Inputs) -> None:
        """One step on `inputs`, whose shapes must always be the same for a `key`."""
        self.num_steps += 1
        if not self._is_cuda:
            self._step(key, inputs)
            return
        if key in self._graphs:
            for name, tensor in inputs.items():
                self._inputs[key][name].copy_(tensor, non_blocking=True)
            self._graphs[key].replay()
            return
        static = {name: tensor.to(self._device, copy=True) for name, tensor in inputs.items()}
        self._inputs[key] = static
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(1 if self._graphs else 2):
                self._step(key, static)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(key, static)
        self._graphs[key] = graph

    def take_means(self) -> list[float]:
        """Mean of each logged part since the last call."""
        count = max(1, self.num_steps - self._logged)
        means = (self._sum / count).tolist()
        self._sum.zero_()
        self._logged = self.num_steps
        return means
