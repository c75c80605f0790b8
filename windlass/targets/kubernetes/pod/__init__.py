"""What runs inside a pod: it joins the others, starts torchrun, forwards logs, decides with them what a death means."""
