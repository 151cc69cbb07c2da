# OUT=DIR ORDER="0:A=150,B=200 1:C=300" [LLAMA=1] bash .lease/lanes.sh TOTAL
# README.md beside it says what ORDER is. A lane, .lease/lanes/NAME.sh, gets CUDA_VISIBLE_DEVICES, LIMIT (seconds) and LOG, a folder
# of which all comes back, and prints to $LOG/NAME.log. The command ends after TOTAL seconds at most.
T0=$(date +%s); TOTAL=$1; H=$PWD/.lease; export LOG=/tmp/log; mkdir -p $LOG
unset PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 HF_HUB_DISABLE_TELEMETRY=1
[ -n "$LLAMA" ] && { setsid bash $H/llama.sh > $LOG/llama.log 2>&1 & }
bash $H/setup.sh > $LOG/setup.log 2>&1 || { cat $LOG/setup.log; exit 1; }
tail -4 $LOG/setup.log
python3 -c "import sparsepack.cli, sparsepack.formats.packed, sparsepack.calibration.folder" || exit 1
lanes() {  # GPUS LIST
  for item in ${2//,/ }; do
    name=${item%%=*}; limit=${item##*=}; left=$(( TOTAL - 12 - $(date +%s) + T0 ))
    [ $left -lt 5 ] && { echo "-- $name: no time left"; continue; }
    [ $limit -gt $left ] && limit=$left
    s=$(date +%s)
    CUDA_VISIBLE_DEVICES=$1 LIMIT=$limit python3 $H/limited.py $limit bash $H/lanes/$name.sh > $LOG/$name.log 2>&1
    echo "-- $name on $1: rc $?, $(( $(date +%s) - s )) s of $limit, began at $(( s - T0 ))"
  done
}
IFS='|' read -ra phases <<< "$ORDER"  # "0:A=1 1:B=2|0+1:C=3": C begins when A and B have ended
for phase in "${phases[@]}"; do
  pids=()
  for part in $phase; do g=${part%%:*}; lanes "${g//+/,}" "${part#*:}" & pids+=($!); done
  for p in "${pids[@]}"; do wait $p; done
done
[ -e /tmp/llama-bin.tar.xz ] && split -b 15M -d /tmp/llama-bin.tar.xz $OUT/llama-bin.; tail -3 /tmp/llama/log 2>/dev/null
(cd $LOG && tar -cf - . | xz -T0 -1 > $OUT/back.tar.xz)
for f in $LOG/*.log; do echo "##### $f"; tail -c ${TAIL:-700} "$f"; done
echo "== all $(( $(date +%s) - T0 )) s"
