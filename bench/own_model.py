"""Train a model that is not this project's, a GRU, by make_optimizer and by DDP with torch.optim.Muon and AdamW."""
from torch import manual_seed, nn, optim

from common import gpt_speedrun, on_ranks, run, some_text, table

VOCAB, DIM, MUON_LR, ADAM_LR = 64, 64, 0.02, 0.003

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, inputs, targets):
        logits = self.head(self.gru(self.embed(inputs.T))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.T.flatten())

def ours(model):
    return model, [gpt_speedrun.make_optimizer(model, muon_lr=MUON_LR, adam_lr=ADAM_LR)]

def theirs(model):
    matrices = [p for p in model.gru.parameters() if p.dim() == 2]
    others = [*model.embed.parameters(), *model.head.parameters(), *(p for p in model.gru.parameters() if p.dim() == 1)]
    return nn.parallel.DistributedDataParallel(model), [optim.Muon(matrices, MUON_LR), optim.AdamW(others, ADAM_LR)]

def train(rank, ranks):
    rows = []
    for name, build in (("ours", ours), ("DDP, Muon and AdamW", theirs)):
        manual_seed(0)
        model, optimizers = build(Model())
        for step in range(100):
            loss = model(*some_text(VOCAB, 8, 32, rank, step))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        rows.append([name, f"{loss:.4f}"])
    return rows

if __name__ == "__main__":
    run(lambda: print(table(["optimizer", "last loss"], on_ranks(2, train))))
