"""Train with histories larger than the process's memory limit.

Run with ``PYTHONPATH=src python benchmarks/beyond_memory.py FOLDER [results.json] [--tiny]``. It trains the same model
on the same generated graph in three processes: with histories in host memory and no limit; with histories in host
memory and a limit below their size (``ulimit -d``), which must fail; and with histories on disk under that limit, which
must finish. The limit covers the process's own memory, not the system's file cache.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = {"nodes": 500_000, "width": 512, "layers": 5, "parts": 50, "epochs": 3, "limit": 3_500_000_000}
TINY = {"nodes": 20_000, "width": 64, "layers": 3, "parts": 10, "epochs": 2, "limit": 1_500_000_000}


def train(storage: str, folder: str | None, cache: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Train in this process; returns losses, times and memory."""
    import torch

    import gnnautoscale as gas
    from gnnautoscale.data import generate
    from gnnautoscale.models import GCN

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = generate.communities(sizes["nodes"], degree=6.0, num_features=16, num_classes=8)
    model = GCN(16, 8, hidden=sizes["width"], layers=sizes["layers"], dropout=0.0)
    start = time.perf_counter()
    result = gas.fit(
        model,
        data,
        num_parts=sizes["parts"],
        cache_dir=cache,
        epochs=sizes["epochs"],
        evaluate_every=sizes["epochs"],
        evaluation="histories",
        storage=storage,  # type: ignore[arg-type]
        history_dir=folder,
        lr=0.001,
    )
    return {
        "history_bytes": result.history_bytes,
        "loss": [epoch.loss for epoch in result.epochs],
        # The first epoch creates the files and the batches.
        "step": sum(epoch.seconds for epoch in result.epochs[1:]) / (sizes["parts"] * (sizes["epochs"] - 1)),
        "seconds": time.perf_counter() - start,
        "most_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_a_process(storage: str, folder: Path, sizes: dict[str, int], limit: int | None) -> dict[str, Any]:
    """Train in a separate process under a limit."""

    def obey() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    histories = str(folder / "histories") if storage == "disk" else None
    work = json.dumps({"storage": storage, "folder": histories, "cache": str(folder / "parts"), "sizes": sizes})
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, "--work", work], preexec_fn=obey, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        return {"failed": reason[:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Compare the three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work")
    options = parser.parse_args()
    if options.work:
        print(json.dumps(train(**json.loads(options.work))))
        return
    sizes = TINY if options.tiny else SIZES
    rows = {
        "host memory, no limit": in_a_process("host", options.folder, sizes, None),
        "host memory, limited": in_a_process("host", options.folder, sizes, sizes["limit"]),
        "disk, limited": in_a_process("disk", options.folder, sizes, sizes["limit"]),
    }
    result = {"sizes": sizes, "rows": rows}
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1))
    for name, row in rows.items():
        if "failed" in row:
            print(f"{name}: failed: {row['failed']}")
        else:
            print(
                f"{name}: histories {row['history_bytes'] / 1e9:.2f} GB, limit {sizes['limit'] / 1e9:.2f} GB, step "
                f"{1e3 * row['step']:.1f} ms, loss {row['loss'][-1]:.4f}, resident at most "
                f"{row['most_resident'] / 1e9:.2f} GB"
            )
    near, far = rows["host memory, no limit"], rows["disk, limited"]
    if "step" in near and "step" in far:
        print(f"disk to host: {far['step'] / near['step']:.2f}; same losses: {near['loss'] == far['loss']}")


if __name__ == "__main__":
    main()
