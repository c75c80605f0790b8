import accelerate
import timm
import torchaudio
