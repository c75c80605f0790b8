import whisper
