#!/bin/sh
# Boots a real systemd as in a machine of its own and runs a command beside it: systemd_box.sh COMMAND...
# The root is an overlay whose upper half is in memory: what runs inside sees this machine's files and can change none of them.
# Needs root, cgroup v2 and overlayfs. Exit status: of the command; 77 where the box cannot be made.
set -eu

cannot() { echo "systemd_box: $*" >&2; exit 77; }

outside() {
    [ "$(id -u)" = 0 ] || cannot "needs root"
    [ -x /lib/systemd/systemd ] || cannot "there is no systemd"
    for tool in unshare nsenter findmnt setpriv pivot_root ip; do command -v $tool >/dev/null || cannot "there is no $tool"; done
    grep -qw overlay /proc/filesystems || cannot "the kernel has no overlayfs"
    cgroups=$(findmnt -n -t cgroup2 -o TARGET | tail -n 1)
    [ -n "$cgroups" ] || cannot "there is no cgroup v2"
    init=''
    stage=$(mktemp -d)
    group=$cgroups/mlxd-box-$$
    mkdir "$group" 2>/dev/null || { rmdir "$stage"; cannot "cgroups cannot be made"; }
    trap rm_box EXIT
    trap 'exit 130' INT TERM
    sh -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' sh "$group" \
        unshare --mount --pid --fork --kill-child --uts --ipc --net --cgroup sh "$0" --inside "$stage" >"$stage.log" 2>&1 &
    box=$!
    wait_for boots
    # Everything but the user namespace; `-m` enters at the box's own root.
    status=0
    # In a session of its own: `kill 0` inside is not for those who wait outside.
    setsid --wait nsenter -t "$init" -m -u -i -n -p -C sh -c 'cd / && exec "$@"' sh "$@" || status=$?
    exit $status
}

boots() {
    kill -0 "$box" 2>/dev/null || { cat "$stage.log" >&2; cannot "systemd has ended"; }
    init=$(ps -o pid= --ppid "$box" | tr -d ' ')
    [ -n "$init" ] && [ "$(cat "/proc/$init/comm")" = systemd ] || return 1
    nsenter -t "$init" -m -u -i -n -p -C systemctl is-active --quiet multi-user.target 2>/dev/null
}

wait_for() {
    tries=0
    until "$@"; do
        [ $tries -lt 600 ] || { cat "$stage.log" >&2; cannot "systemd did not come up"; }
        tries=$((tries + 1))
        sleep 0.1
    done
}

rm_box() {
    # With its PID 1 all of it ends; the groups can go when the last is reaped. unshare itself ignores SIGTERM.
    kill -9 $init "$box" 2>/dev/null || true
    wait "$box" 2>/dev/null || true
    tries=0
    while [ -d "$group" ] && [ $tries -lt 100 ]; do
        find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
        tries=$((tries + 1))
    done
    rm -f "$stage.log"
    rmdir "$stage"
}

inside() {
    stage=$1
    mount --make-rprivate /
    mount -t tmpfs -o mode=755 box "$stage"
    mkdir "$stage/upper" "$stage/work" "$stage/root"
    mount -t overlay -o "lowerdir=/,upperdir=$stage/upper,workdir=$stage/work" box "$stage/root" || cannot "overlayfs refused"
    new=$stage/root
    mount -t proc proc "$new/proc"
    mount --bind "$new/proc/sys" "$new/proc/sys"
    mount -o remount,bind,ro "$new/proc/sys"
    mount -t sysfs -o ro sys "$new/sys"
    mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 dev "$new/dev"
    for node in null zero full random urandom tty; do : >"$new/dev/$node"; mount --bind "/dev/$node" "$new/dev/$node"; done
    ln -s /proc/self/fd "$new/dev/fd"
    mkdir "$new/dev/shm" "$new/dev/old"
    for folder in dev/shm run tmp; do mount -t tmpfs -o mode=1777 box "$new/$folder"; done
    chmod 755 "$new/run"
    ip link set lo up
    cd "$new"
    pivot_root . dev/old
    umount -l /dev/old
    rmdir /dev/old
    is_alone || cannot "the box is not closed"
    : >/run/mlxd-box
    only_what_is_needed
    # It may not touch the machine below: no device nodes, kernel modules, clock, reboot or raw disk.
    export container=box
    exec setpriv --bounding-set -mknod,-sys_module,-sys_time,-sys_boot,-sys_rawio,-syslog \
        --inh-caps -mknod,-sys_module,-sys_time,-sys_boot,-sys_rawio,-syslog \
        /lib/systemd/systemd --system --unit=multi-user.target --log-target=kmsg --show-status=0
}

# Nothing of a boot but the manager itself: no devices, kernel settings, temporary files or logins.
only_what_is_needed() {
    units=/etc/systemd/system
    rm -rf $units
    mkdir -p $units
    ln -s /dev/null $units/systemd-remount-fs.service
    for unit in /lib/systemd/system/sysinit.target.wants/* /lib/systemd/system/sockets.target.wants/* \
        /lib/systemd/system/timers.target.wants/* /lib/systemd/system/multi-user.target.wants/* \
        /lib/systemd/system/local-fs.target.wants/*; do
        [ "${unit##*.}" = target ] || ln -sf /dev/null "$units/${unit##*/}"
    done
}

# The last gate before anything that writes: nothing but the overlay and file systems in memory may be writable.
is_alone() {
    [ "$(findmnt -n -o FSTYPE /)" = overlay ] || return 1
    ! findmnt -rn -o FSTYPE,OPTIONS,TARGET | grep -vE '^(overlay|tmpfs|proc|cgroup2) |^devtmpfs .* /dev/(null|zero|full|random|urandom|tty)$' |
        grep -qE '^[^ ]+ rw'
}

case ${1:-} in
--inside) inside "$2" ;;
*) outside "$@" ;;
esac
