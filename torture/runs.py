"""The runs that are killed: what each does in a folder, small enough for seconds and with many checkpoints.

Every entry is a script of its own, started again with the same words after a kill, as a user would.
"""

from __future__ import annotations

# What takes long to import, imported once before the runs are forked.
MODULES = (
    "torture.models",
    "transformers.models.bert.modeling_bert",
    "whence.faithful.evaluate",
    "whence.identifiable.conversion.convert",
    "whence.identifiable.training.trainer",
    "whence.surveys.run",
    "whence.tokens.token_identifiability",
)

TRAIN = """
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.fit import Settings, train
size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
train(demo_data(320), demo_data(40, seed=1), out=folder,
      settings=Settings(epochs=6, batch_size=16, patience=0, checkpoint_steps=3, model=size))
"""
CONVERT = """
from pathlib import Path
from transformers import BertConfig, BertModel
import whence
from whence.identifiable.conversion import distillation
from whence.identifiable.conversion.convert import tie_keys
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.vocabulary import train_tokenizer
distillation.distil.__kwdefaults__["every"] = 3
texts = list(demo_data(80).texts)
tokenizer = train_tokenizer(texts, 80, 48)
torch.manual_seed(0)
config = BertConfig(vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                    intermediate_size=32, max_position_embeddings=48)
model = whence.Model(BertModel(config).eval(), tokenizer, name="tiny")
Path(folder).mkdir(exist_ok=True)
tie_keys(model, texts, 150, tokens=64, lengths=(16,), texts_per_length=4,
         checkpoint=Path(folder) / "distillation.safetensors").save(folder)
"""
TOKENS = """
from pathlib import Path
from transformers import BertConfig, BertModel
import whence
from whence.identifiable.training.demo import demo_data
from whence.identifiable.training.vocabulary import train_tokenizer
from whence.tokens.training import Training
texts = list(demo_data(120).texts)
tokenizer = train_tokenizer(texts, 80, 48)
torch.manual_seed(0)
config = BertConfig(vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                    intermediate_size=32, max_position_embeddings=48)
model = whence.Model(BertModel(config).eval(), tokenizer, name="tiny")
whence.token_identifiability(model, texts, maps=("naive", "linear"), bootstrap=50, training=Training(epochs=10),
                             memory=0, folder=folder, checkpoint=folder)
"""
SURVEY = """
from torture.models import families, texts
import whence
whence.survey(families()["bert"], texts(24), folder, shard_size=2, rows=1, without="alti")
"""
FAITHFUL = """
from pathlib import Path
from torture.models import classifier, texts
import whence
Path(folder).mkdir(exist_ok=True)
whence.faithfulness(classifier(), texts(20), methods="gradient,occlusion", random=2, ceiling="none",
                    save=Path(folder) / "run.jsonl").save(Path(folder) / "result.jsonl")
"""
LANGUAGE = """
from whence.identifiable.training.documents import demo_documents
from whence.identifiable.training.language_model import LanguageModelSettings, train_language_model
size = {"hidden_size": 16, "num_hidden_layers": 2}
train_language_model(demo_documents(200), out=folder, settings=LanguageModelSettings(
    vocab_size=300, context=32, batch_size=8, epochs=1, checkpoint_steps=4, model=size))
"""
RUNS = {
    "train": TRAIN, "language": LANGUAGE, "convert": CONVERT, "tokens": TOKENS, "survey": SURVEY, "faithful": FAITHFUL,
}  # fmt: skip
