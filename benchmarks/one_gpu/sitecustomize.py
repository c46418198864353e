# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH, all ranks that a launcher starts on this machine share its first GPU:

    PYTHONPATH=benchmarks/one_gpu torchrun --standalone --nproc_per_node 2 recipes/ddp_cifar.py

NCCL refuses two ranks on one GPU of one host. So each rank is the only one of a host of its own,
and NCCL connects the ranks by sockets. NCCL 2.30 takes them on one host, too, and then uses shared
memory, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set. Python runs this file at its start.
"""

import os

SETTINGS = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
# Few blocks of threads per collective, and none of what needs a GPU for each rank.
SETTINGS |= {"NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}

if "RANK" in os.environ and "LOCAL_RANK" in os.environ:  # a rank, or a process that it has started
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        SETTINGS["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    os.environ |= SETTINGS | dict(os.environ) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
