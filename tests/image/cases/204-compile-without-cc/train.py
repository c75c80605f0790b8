import lightning as L
import torch


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2000, 512), torch.nn.GELU(), torch.nn.Linear(512, 2000))

    def training_step(self, batch, _):
        (x,) = batch
        return torch.nn.functional.mse_loss(self.net(x), x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


model = Model()
model.net = torch.compile(model.net)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 2000)), batch_size=256)
L.Trainer(accelerator="gpu", devices=1, max_epochs=1).fit(model, data)
