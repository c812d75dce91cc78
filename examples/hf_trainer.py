"""Stay with Hugging Face's Trainer, and change the batch sampler: less padding, same samples.

    python examples/hf_trainer.py

Each effective batch has the same samples as before, in random order over the run; within it they
are sorted by length, so a micro-batch holds samples that need little padding.
"""

import tempfile

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradaccum as ga
from gradaccum.collate import collate_function
from gradaccum.recipes.text.encode import encode
from gradaccum.recipes.text.stdlib import functions
from gradaccum.recipes.text.tokenizer import train_tokenizer

texts = functions()[:200]
tokenizer = train_tokenizer(texts, vocab_size=512)
dataset = [
    {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
    for ids in encode(tokenizer, texts, max_length=128)
]
lengths = [len(sample["input_ids"]) for sample in dataset]


class LengthOrdered(Trainer):
    """Trainer with effective batches that are ordered by length."""

    def get_train_dataloader(self):
        """Return the loader: this is the whole change."""
        sampler = ga.EffectiveBatchSampler(lengths, size=32, micro_batch_size=8)
        loader = DataLoader(
            self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(tokenizer),
    n_embd=32,
    n_layer=1,
    n_head=1,
    n_positions=128,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
with tempfile.TemporaryDirectory() as folder:
    trainer = LengthOrdered(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=dataset,
        data_collator=collate_function(tokenizer),
    )
    result = trainer.train()
print(f"{trainer.state.global_step} optimizer steps, loss {result.training_loss:.3f}")
