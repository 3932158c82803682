"""Looks what is wrong before a run: `python -m hetero.doctor hardware=NAME`; with --self-test at this machine's device.

The arguments are those of train.py. Nothing is trained, loaded or downloaded; a worker needs only to listen.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from hetero.errors import HeteroError

_EPILOG = """examples:
  python -m hetero.doctor hardware=mine shard_plan=mine
  python -m hetero.doctor hardware=mine --json > findings.json
  python -m hetero.doctor --self-test mac-m4.json
The exit code is 0 where nothing is wrong, 1 where a check failed, 2 for a mistake in the arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hetero.doctor",
        description="Check machines, versions, devices and lines before a run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: hardware=NAME, ...")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--config-dir", type=Path, help="a second folder of configuration groups, as for train.py")
    parser.add_argument(
        "--self-test",
        nargs="?",
        const=Path("hetero-self-test.json"),
        type=Path,
        metavar="FILE",
        help="check this machine's own device (exactness, gradients, nf4) and write the figures to FILE",
    )
    parser.add_argument("--device", default="auto", help="device of the self-test: auto, cpu, mps, cuda, cuda:1")
    arguments = parser.parse_args(argv)
    try:
        if arguments.self_test is not None:
            return _self_test(arguments.self_test, arguments.device, as_json=arguments.json)
        return _diagnose(arguments.overrides, arguments.config_dir, as_json=arguments.json)
    except HeteroError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _diagnose(overrides: Sequence[str], config_dir: Path | None, *, as_json: bool) -> int:
    from hetero.checked import convert
    from hetero.config import SHAPES_DIR, composed
    from hetero.resolve import check_hosts, resolve
    from hetero.spec import Config

    raw = composed(overrides, [] if config_dir is None else [config_dir])
    config = convert(raw, Config)
    check_hosts(config)
    workers = config.hardware.workers
    if workers or config.shard_plan.stages is not None:
        workers = resolve(raw, shapes_dir=SHAPES_DIR, for_drawing=True).workers  # in the order of the pipeline

    import rich

    from hetero import doctor_table
    from hetero.doctor_checks import diagnose

    diagnosis = diagnose(config.hardware, workers, config.transport.topology)
    if as_json:
        sys.stdout.write(doctor_table.as_json(diagnosis) + "\n")
    else:
        doctor_table.show(diagnosis, rich.get_console())
    return 0 if diagnosis.is_well else 1


def _self_test(file: Path, device: str, *, as_json: bool) -> int:
    from hetero.self_test import self_test, show_report, write_report

    # Libraries' notes to their own developers, as the scripts leave them out.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    report = self_test(device)
    write_report(report, file)
    sys.stdout.write(file.read_text(encoding="utf-8") if as_json else show_report(report, file))
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
