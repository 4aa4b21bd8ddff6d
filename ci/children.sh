# shellcheck shell=bash
# Sourced by ci/test, ci/certify and ci/nightly, so that a signal to the script reaches every process that it started, and
# the script ends only after they have ended.
#
#   attended COMMAND...    run a command or function; the status is the command's, or 128 + n once signal n has come
#   answered COMMAND...    the same, with the command's output in $answer
#   background COMMAND...  start it and go on; `end_background` ends it
#
# Each command gets its own process group, so only the script receives Ctrl-C, and passes it on.

# How long processes have to end by themselves before they are killed. `fsdp-conformance run` takes up to 20 s, so
# ci/certify waits longer than that, and the scripts that run ci/certify wait longer still.
children_grace_s=${children_grace_s:-40}
attended_child=
background_children=()
# 128 and the number of the first signal; empty as long as none has come.
interrupted_status=

trap 'interrupt_children 1 HUP' HUP
trap 'interrupt_children 2 INT' INT
trap 'interrupt_children 15 TERM' TERM

attended() {
    local status=0
    [ -z "$interrupted_status" ] || return "$interrupted_status"
    start_in_group "$@"
    attended_child=$!
    # A signal between the start and here found no child to pass it on to.
    [ -z "$interrupted_status" ] || end_children TERM "$attended_child"
    # bash reports a child that a signal has ended here, with a line of this file.
    { wait "$attended_child" || status=$?; } 2>/dev/null
    # What a killed child had started would go on.
    [ "$status" -le 128 ] || [ -n "$interrupted_status" ] || end_children TERM "$attended_child"
    attended_child=
    return "${interrupted_status:-$status}"
}

answered() {
    local file status=0
    file=$(mktemp)
    attended "$@" >"$file" || status=$?
    # shellcheck disable=SC2034  # for the caller
    answer=$(cat "$file")
    rm -f "$file"
    return "$status"
}

background() {
    start_in_group "$@"
    background_children+=($!)
}

end_background() {
    [ ${#background_children[@]} -eq 0 ] || end_children TERM "${background_children[@]}"
    background_children=()
}

# Monitor mode gives each background command its own group. Without it they would also ignore SIGINT.
start_in_group() {
    set -m
    "$@" </dev/null &
    set +m
}

interrupt_children() {
    [ -n "$interrupted_status" ] || interrupted_status=$((128 + $1))
    # ${array[@]+...}: an empty array counts as unset in older versions of bash.
    set -- "$2" ${attended_child:+"$attended_child"} ${background_children[@]+"${background_children[@]}"}
    [ $# -eq 1 ] || end_children "$@"
}

# end_children SIGNAL PID...: send the signal to these groups and wait for everything that they started, in whatever
# session it is. What outlives them, or has not ended after two thirds of the grace period, gets SIGTERM. What is left
# after all of it is killed.
end_children() {
    local signal=$1 family child told='' deadline=$((SECONDS + children_grace_s)) patience
    patience=$((SECONDS + children_grace_s * 2 / 3))
    shift
    family=$(descendants "$@")
    for child in "$@"; do kill -s "$signal" -- "-$child" 2>/dev/null || true; done
    # A process that loses its parent is no longer a descendant, so everything that was found once stays in the list.
    # shellcheck disable=SC2086  # one word for each process
    while family=$(descendants $family) && [ -n "$family" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            kill -s KILL $family 2>/dev/null || true
            break
        fi
        sleep 0.2
        if [ -z "$told" ] && { [ "$SECONDS" -ge "$patience" ] || ! any_of "$family" "$@"; }; then
            told=yes
            kill -s TERM $family 2>/dev/null || true
        fi
    done
}

# any_of "PID..." PID...: whether one of the latter is among the former.
any_of() {
    local pid
    for pid in "${@:2}"; do case " ${1//$'\n'/ } " in *" $pid "*) return 0 ;; esac; done
    return 1
}

# descendants PID...: those of these processes that are alive, and everything below them. Without /proc: only the former.
descendants() {
    local pid stat line rest count=0 found=" $* "
    if [ ! -d /proc/self ]; then
        for pid in "$@"; do if kill -0 "$pid" 2>/dev/null; then echo "$pid"; fi; done
        return
    fi
    local -A parent=()
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue
        # The command's name may hold spaces and parentheses; what follows the last one is regular.
        read -r -a rest <<<"${line##*) }"
        case ${rest[0]} in Z | X) ;; *) parent[${line%% *}]=${rest[1]} ;; esac
    done
    while [ "$count" -ne "${#found}" ]; do
        count=${#found}
        for pid in "${!parent[@]}"; do
            case $found in *" $pid "*) ;; *" ${parent[$pid]} "*) found+="$pid " ;; esac
        done
    done
    for pid in $found; do if [ -n "${parent[$pid]:-}" ]; then echo "$pid"; fi; done
}
