"""What a node of H100s can do, and how long bytes and FLOPs take on it.

Lives here: Node, the one table of speeds with the source of each number, and seconds from counts.
Not here: the counts (traffic.py, memory.py), and what a step is made of (clock.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """Speeds are bytes a second in one direction, a GPU; `share_` is the part of each that is reckoned with.

    Sources. [H] NVIDIA H100 SXM5 data sheet: 80 GB HBM3 at 3.35 TB/s, 989 TFLOPS bf16 without sparsity, NVLink 900 GB/s
    and PCIe Gen5 128 GB/s, both counted in two directions. [D] DGX H100 user guide: 8 GPUs, one single-port ConnectX-7
    at 400 Gb/s (NDR InfiniBand) a GPU, 2 TB of memory a node. [A] assumed here: the shares, about what nccl-tests and
    copies reach at large sizes and what tuned GPT trainers reach of the matrix units; the delays; what is kept free.
    """

    gpus: int = 8
    """[D]"""
    memory: int = 80 * 10**9
    """[H] Bytes of HBM a GPU."""
    kept_free: int = 4 * 10**9
    """[A] For the CUDA context, NCCL's buffers and fragmentation."""
    host_memory: int = 2 * 10**12 // 8
    """[D] Bytes of host memory a GPU."""
    host_kept_free: int = 32 * 10**9
    """[A] For the system, processes and the page cache."""
    flops: float = 989e12
    """[H]"""
    share_flops: float = 0.4
    """[A]"""
    hbm: float = 3.35e12
    """[H]"""
    share_hbm: float = 0.8
    """[A]"""
    nvlink: float = 450e9
    """[H]"""
    share_nvlink: float = 0.8
    """[A]"""
    fabric: float = 50e9
    """[D]"""
    share_fabric: float = 0.85
    """[A]"""
    pcie: float = 64e9
    """[H]"""
    share_pcie: float = 0.8
    """[A]"""
    delay_node: float = 15e-6
    """[A] Seconds before a collective of one node moves anything."""
    delay_fabric: float = 40e-6
    """[A] The same of several nodes."""
    delay_peer: float = 0.3e-6
    """[A] Seconds more for each peer of an all-to-all."""

    def math_seconds(self, flops: float) -> float:
        """Of matrix products."""
        return flops / (self.flops * self.share_flops)

    def memory_seconds(self, moved: float) -> float:
        """Of bytes read from and written to HBM."""
        return moved / (self.hbm * self.share_hbm)

    def host_seconds(self, moved: float) -> float:
        """Of bytes between host and GPU, in the busier direction."""
        return moved / (self.pcie * self.share_pcie)

    def ring_seconds(self, sent: float, size: int) -> float:
        """Of a reduction or a gather in which each of `size` GPUs sends so many bytes.

        Across nodes the rings of a node leave it by all of its ports, so that a GPU is not held to its own.
        """
        if size == 1:
            return 0.0
        link = self.nvlink * self.share_nvlink
        if size <= self.gpus:
            return self.delay_node + sent / link
        return self.delay_fabric + sent / min(link, self.gpus * self.fabric * self.share_fabric)

    def spread_seconds(self, sent: float, size: int) -> float:
        """Of an all-to-all in which the busiest of `size` GPUs sends so many bytes, evenly to all others.

        What leaves the node goes by the GPU's own port, the rest by NVLink, at the same time.
        """
        if size == 1:
            return 0.0
        outside = max(0, size - self.gpus) / (size - 1)
        inside = sent * (1 - outside) / (self.nvlink * self.share_nvlink)
        leaving = sent * outside / (self.fabric * self.share_fabric)
        delay = self.delay_fabric if outside else self.delay_node
        return delay + self.delay_peer * (size - 1) + max(inside, leaving)
