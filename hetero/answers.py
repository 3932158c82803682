"""The prompts of a run, answered by the stages as they are: shown as the texts come, and kept."""

from __future__ import annotations

from hetero.generate import Generator, generate
from hetero.member import Member
from hetero.prepare import Prepared
from hetero.prompts import end_tokens
from hetero.resolve import ResolvedRun
from hetero.run_result import RunResult
from hetero.samples import SampleView, write_samples
from hetero.session import CoordinatorSession
from hetero.spec import RunSpec
from hetero.stopping import Stop


def answer_prompts(
    resolved: ResolvedRun,
    prepared: Prepared,
    spec: RunSpec,
    session: CoordinatorSession,
    member: Member,
    stop: Stop,
    result: RunResult,
) -> None:
    """Answers a run's prompts, batch by batch.

    Args:
        resolved, prepared, spec: the run.
        session: the other stages.
        member: stage 0.
        stop: says whether the run is to end.
        result: gets the samples and where they are kept.

    Raises:
        PeerError: a worker failed.
    """
    assert spec.generation is not None
    result.samples = []
    with SampleView(min(spec.generation.batch_size, len(prepared.prompts))) as view:
        generator = Generator(
            member=member,
            session=session,
            tokenizer=prepared.tokenizer,
            settings=resolved.config.generation,
            end_ids=end_tokens(prepared.model_path),
            pad_id=prepared.pad_id,
            max_positions=resolved.facts.max_position_embeddings,
            on_text=view.on_text,
            stop=stop,
        )
        for samples in generate(generator, prepared.prompts):
            result.samples += samples
            result.samples_path = write_samples(result.adapter_dir.parent, result.samples)
