"""Fine-tune a small GPT on Python's manual, and see which passages taught it to continue an unseen one.

    python examples/finetune_gpt.py            a few minutes
    python examples/finetune_gpt.py --small    some seconds

Nothing is downloaded: first the model learns from source code, then from the help texts that come with Python; this is recorded.
"""

import argparse
import inspect
import pydoc_data.topics
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import backstory
from backstory.demo.data import Bytes, Document, cut, decode

LENGTH = 64  # bytes in a passage


def loss(model, tokens):  # the mean over all bytes; the first one is never predicted
    return model(input_ids=tokens, labels=tokens).loss


def pretrain(model, steps):
    code = cut([Document("inspect", "code", inspect.getsource(inspect))], Bytes(), LENGTH).tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss(model, code[torch.randint(len(code), (16,))]).backward()
        optimizer.step()
        optimizer.zero_grad()


def finetune(model, manual, train, out):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with backstory.record(model, optimizer, out, loss_reduction="token-mean") as rec:
        for batch in train.split(8):
            ids = [manual.ids[i] for i in batch]  # an ID per passage, and how many bytes of it have a loss
            with rec.step(ids, tokens=[LENGTH - 1] * len(ids)):
                loss(model, manual.tokens[batch]).backward()
                optimizer.step()
            optimizer.zero_grad()
        rec.describe([manual.ids[i] for i in train], text=[decode(manual.tokens[i].tolist(), Bytes()) for i in train])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true", help="fewer steps and passages")
    options.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for the run")
    args = options.parse_args()

    torch.manual_seed(0)
    size = dict(n_layer=1, n_embd=16, n_head=2) if args.small else dict(n_layer=3, n_embd=96, n_head=4)
    size |= dict(vocab_size=256, n_positions=LENGTH, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**size))
    topics = {name: text for name, text in pydoc_data.topics.topics.items() if len(text) > 1000}
    manual = cut([Document(name, "manual", text) for name, text in topics.items()], Bytes(), LENGTH)
    order = torch.randperm(len(manual.ids))
    train, unseen = order[: 120 if args.small else 4000], order[-64:]

    pretrain(model, 20 if args.small else 400)
    print(f"Loss on unseen passages before fine-tuning: {loss(model, manual.tokens[unseen]):.2f} nats per byte")
    finetune(model, manual, train, args.out)
    print(f"after: {loss(model, manual.tokens[unseen]):.2f}\n")

    run, query = backstory.open(args.out), manual.tokens[unseen[:1]]
    result = run.query(model, loss, query)
    print(f"An unseen passage of {manual.ids[unseen[0]]}:\n  {decode(query[0].tolist(), Bytes())!r}\n")
    print("The passages that helped the model most with it:")
    for hit in result.top(5):
        text = run.content([hit.sample])[hit.sample]["text"]
        print(f"  {hit.influence:+.5f} at step {hit.step:3}, {hit.sample}: {text!r}")
    print(f"\n{result.quality.sentence}")


if __name__ == "__main__":
    main()
