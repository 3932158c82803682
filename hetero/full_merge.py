"""Base and adapter made one model, file by file and tensor by tensor, so that the whole is never in memory."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hetero.adapter_on_base import check_on_base, consists_of
from hetero.adapter_whole import changes_of
from hetero.base_files import SINGLE, BaseTensor, read_base
from hetero.errors import ConfigError
from hetero.families import Family, family_of
from hetero.merge_module import merge_module
from hetero.models import meta_model
from hetero.shards import INDEX
from hetero.tensor_stream import DTYPES, FLOATS, Planned, from_file, from_tensor, write_file

log = logging.getLogger(__name__)

# What goes along with the weights: tokenizer, generation settings, chat template, licence.
_ALONG = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "LICENSE*",
    "NOTICE*",
)


class Merger:
    """Merges an adapter into a base model's files.

    Args:
        folder: of the base model.
        config: of the adapter, content of adapter_config.json.
        tensors: of the adapter by global key.
        dtype: of the floating point numbers in the result, as torch names it; None: each as the base has it.
        named: how the user named the adapter, for messages.

    Raises:
        ConfigError: the adapter does not fit this base, or cannot be merged into it.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        dtype: str | None,
        named: str = "RUN",
    ) -> None:
        self.folder, self._adapter = folder, config
        self._about: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.quantised = bool(self._about.get("quantization_config"))
        self._family: Family = family_of(self._about["model_type"])
        self._dtype = None if dtype is None else {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
        expected = consists_of(config, folder, named)
        check_on_base(tensors, expected, folder, named)
        self._whole = meta_model(folder)
        self._changes = changes_of(tensors)
        self._files = read_base(folder, self._about)
        self._names = self._names_in_the_model()
        self._by_name = {self._names[one.key]: one for own in self._files.values() for one in own}
        self._refuse_parameters(expected.parameters)
        self.unties = self._unties()
        self._kept: tuple[str, dict[str, torch.Tensor]] = "", {}
        self._check()

    def num_bytes(self) -> int:
        """Bytes of the result's tensors."""
        return sum(one.num_bytes() for file in self._files for one in self._planned(file))

    def write(self, out: Path) -> None:
        """Writes the merged model into an empty folder."""
        total = 0
        weight_map: dict[str, str] = {}
        for number, file in enumerate(self._files, 1):
            planned = self._planned(file)
            total += write_file(out / file, planned)
            weight_map |= {one.key: file for one in planned}
            log.info("wrote %s (%d of %d)", file, number, len(self._files))
        if list(self._files) != [SINGLE]:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (out / "config.json").write_text(json.dumps(self._config(), indent=2) + "\n", encoding="utf-8")
        for beside in sorted({one for pattern in _ALONG for one in self.folder.glob(pattern) if one.is_file()}):
            shutil.copyfile(beside, out / beside.name)

    def dtype(self) -> str:
        """What most of the result's numbers are, as torch names it."""
        count: dict[str, int] = {}
        for file in self._files:
            for one in self._planned(file):
                count[one.dtype] = count.get(one.dtype, 0) + one.num_bytes()
        return str(DTYPES[max(count, key=lambda name: count[name])]).removeprefix("torch.")

    def _names_in_the_model(self) -> dict[str, str]:
        """Name in the files -> name in the model.

        Files of a base model alone leave the first part out, and some families' files have a name of their own for the
        head.
        """
        known, prefix = set(self._whole.state_dict()), self._whole.base_model_prefix
        names = {}
        for key in (one.key for own in self._files.values() for one in own):
            module, _, parameter = key.rpartition(".")
            name = f"lm_head.{parameter}" if module == self._family.head_in_files else key
            names[key] = f"{prefix}.{name}" if name not in known and f"{prefix}.{name}" in known else name
        return names

    def _refuse_parameters(self, parameters: Sequence[str]) -> None:
        if not parameters:
            return
        name, shape = parameters[0], list(self._whole.get_parameter(parameters[0]).shape)
        if name not in self._by_name:
            reason = f"the base's files hold apart what the model holds as one tensor, {name} {shape}"
        elif len(shape) == 2:
            reason = f"{name} {shape} is the weight of one module, which adapter.target_modules would adapt alike"
        else:
            reason = f"{name} {shape} would need all experts in memory at once"
        raise ConfigError(
            f"merge --full cannot merge adapter.target_parameters: {reason}; merge without --full, and let PEFT's "
            "merge_and_unload do it where the whole model fits in memory"
        )

    def _unties(self) -> bool:
        """Whether the head becomes another matrix than the embedding, of which the base has only one."""
        head = "lm_head" in self._changes.lora or "lm_head.weight" in self._changes.replaced
        return bool(self._whole.config.tie_word_embeddings) and head

    def _check(self) -> None:
        base = {*self._by_name}
        if self.unties:
            base.add("lm_head.weight")
        wanted = {f"{module}.weight" for module in self._changes.lora} | {*self._changes.replaced}
        if missing := sorted(wanted - base):
            raise ConfigError(
                f"--base must hold every tensor that the adapter changes, {self.folder} lacks {missing[0]} "
                f"({len(missing)} in all): it is another model, or its files name or lay out these tensors otherwise"
            )
        if not self.unties and bool(self._whole.config.tie_word_embeddings):
            trained = [name for name in wanted if f".{self._family.embedding}." in f".{name}"]
            if trained:
                raise ConfigError(
                    f"merge --full cannot merge {trained[0]}, which is the head's matrix too in this base"
                )
        for module, lora in self._changes.lora.items():
            if "lora_B.bias" in lora and f"{module}.bias" not in base:
                raise ConfigError(
                    f"merge --full cannot merge adapter.lora_bias: {module} has no bias in the base; merge without "
                    "--full, the adapter can be loaded by PEFT"
                )
            self._check_sizes(module, lora)
        for name, value in self._changes.replaced.items():
            if name in self._by_name and self._by_name[name].shape != list(value.shape):
                raise self._misfit(name, list(value.shape), self._by_name[name].shape)

    def _check_sizes(self, module: str, lora: Mapping[str, torch.Tensor]) -> None:
        weight = self._weight_of(module)
        a, b = (
            lora.get("lora_A.weight", lora.get("lora_embedding_A")),
            lora.get("lora_B.weight", lora.get("lora_embedding_B")),
        )
        if a is None or b is None:
            raise ConfigError(f"the adapter is not whole: it has only one of A and B for {module}")
        if sorted((a.shape[-1], b.shape[0])) != sorted(weight.shape):
            raise self._misfit(module, [b.shape[0], a.shape[-1]], weight.shape)

    def _misfit(self, name: str, ours: list[int], theirs: list[int]) -> ConfigError:
        return ConfigError(
            f"--base must be the model that the adapter was trained on, but {name} is {theirs} in {self.folder} and "
            f"{ours} in the adapter"
        )

    def _weight_of(self, module: str) -> BaseTensor:
        if self.unties and module == "lm_head" and "lm_head.weight" not in self._by_name:
            return self._by_name[self._embedding()]
        return self._by_name[f"{module}.weight"]

    def _embedding(self) -> str:
        return next(name for name in self._by_name if name.endswith(f"{self._family.embedding}.weight"))

    def _planned(self, file: str) -> list[Planned]:
        planned = []
        for one in self._files[file]:
            name = self._names[one.key]
            planned.append(self._plan(one.key, name, one))
            if self.unties and name == self._embedding() and "lm_head.weight" not in self._by_name:
                planned.append(self._plan("lm_head.weight", "lm_head.weight", one))
        return planned

    def _plan(self, key: str, name: str, base: BaseTensor) -> Planned:
        dtype = self._dtype if self._dtype is not None and base.dtype in FLOATS else base.dtype
        module, _, parameter = name.rpartition(".")
        changed = name in self._changes.replaced or module in self._changes.lora
        if not changed and not base.quantised:
            return Planned(key, dtype, base.shape, from_file(base.file, base.entry, dtype))

        def write(out: BinaryIO) -> None:
            from_tensor(self._value(module, parameter, base).to(DTYPES[dtype]))(out)

        return Planned(key, dtype, base.shape, write)

    def _value(self, module: str, parameter: str, base: BaseTensor) -> torch.Tensor:
        """A changed or 4-bit parameter."""
        if module not in self._changes.lora:
            replaced = self._changes.replaced.get(f"{module}.{parameter}")
            return base.read() if replaced is None else replaced
        if self._kept[0] != module:  # its weight and its bias are written one after the other or in two files
            values = {"weight": self._weight_of(module).read()}
            if (bias := self._by_name.get(f"{module}.bias")) is not None:
                values["bias"] = self._changes.replaced.get(f"{module}.bias", bias.read())
            leaf = self._whole.get_submodule(module)
            merged = merge_module(module, leaf, values, self._changes.lora[module], self._adapter)
            if parameter == "weight" and "bias" not in values:
                return merged["weight"]
            self._kept = module, merged
        return self._kept[1][parameter]

    def _config(self) -> dict[str, Any]:
        about = dict(self._about)
        about.pop("quantization_config", None)
        about["torch_dtype" if "torch_dtype" in about and "dtype" not in about else "dtype"] = self.dtype()
        if self.unties:
            about["tie_word_embeddings"] = False
        return about
