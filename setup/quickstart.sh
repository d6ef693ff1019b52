#!/usr/bin/env bash
# From a fresh machine to a trained Vision Transformer, its logs and its pictures.
#
#   bash setup/quickstart.sh                # five ranks on this machine, with or without GPUs
#   bash setup/quickstart.sh --epochs 5     # options go to both training scripts
#   bash setup/quickstart.sh --hostfile my_hosts.txt      # other than hosts.txt; first
#
# Makes the environment, trains on 1,437 real images of digits (they ship inside
# scikit-learn) through torch.distributed and through DeepSpeed, for 15 epochs, and draws what
# happened. Takes two and a half minutes on two cores; with pip in place of uv half a minute more.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
hostfile=hosts.txt
if [ "${1:-}" = --hostfile ]; then
  hostfile=$(realpath -m -- "${2:?--hostfile needs a file}")
  shift 2
fi

cd "$root"
echo "== 1/4 environment"
bash setup/make_env.sh
unset PYTHONHOME PYTHONPATH PYTHONOPTIMIZE PYTHONSAFEPATH # of another Python
export PATH=${MOTLEY_VENV:-$root/.venv}/bin:$PATH
python -P -m motley.cluster.hostfile "$hostfile" >/dev/null

run=quickstart-$(date +%Y-%m-%d_%H-%M-%S)
step=2
for script in torch_dist/train_vit.py deepspeed/train_vit.py; do
  engine=${script%%/*}
  printf '\n== %s/4 mpirun -np 5 --hostfile %s ./entry_cn.sh %s --epochs 15\n' \
    "$step" "$hostfile" "$script"
  mpirun -np 5 --hostfile "$hostfile" ./entry_cn.sh "$script" --run "$run-$engine" --epochs 15 "$@"
  step=$((step + 1))
done

printf '\n== 4/4 pictures\n'
python plots/plot_gpu.py "logs/$run-torch_dist" "logs/$run-deepspeed"
python plots/plot_training.py "logs/$run-torch_dist" "logs/$run-deepspeed"
cat <<END

Done. Look at the pictures above, or at all of it: python plots/report.py logs/$run-torch_dist
Next: your own machines, in hosts.txt (README.md), or your own model (docs/your_model.md).
END
