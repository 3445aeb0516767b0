package initlink

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// listen makes the run's socket, mode 0600 from its first moment, in place of one that an earlier agent left. The path goes
// through an open directory, so that its length does not matter.
func listen(dir string) (*net.UnixListener, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if err := os.Remove(filepath.Join(dir, SocketName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), SocketName)
	defer f.Close()
	if err := unix.Fchmod(fd, 0o600); err != nil { // Linux gives the file the socket's mode
		return nil, fmt.Errorf("socket mode: %w", err)
	}
	path := "/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + SocketName
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	return ul, nil
}

// errPeer says that a connection does not come from the run's carrel-init.
var errPeer = errors.New("peer is not this run's carrel-init")

// checkPeer admits root processes that are the container's first process or its direct child, and gives the process id. Where
// the kernel has SO_PEERPIDFD, the process is held by it, so that a reused id cannot stand in for a dead peer.
func checkPeer(conn *net.UnixConn, enginePID int) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	pidfd := -1
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err == nil {
			pidfd = n
		}
	})
	if pidfd >= 0 {
		defer unix.Close(pidfd)
	}
	if err := errors.Join(err, credErr); err != nil {
		return 0, fmt.Errorf("peer of connection: %w", err)
	}
	pid = int(cred.Pid)
	if pid <= 0 || cred.Uid != 0 {
		return 0, fmt.Errorf("%w: process %d, uid %d", errPeer, pid, cred.Uid)
	}
	if pid != enginePID {
		parent, err := parentOf(pid)
		if err != nil || parent != enginePID {
			return 0, fmt.Errorf("%w: process %d is a child of %d, not of %d", errPeer, pid, parent, enginePID)
		}
	}
	if pidfd >= 0 && unix.PidfdSendSignal(pidfd, 0, nil, 0) != nil {
		return 0, fmt.Errorf("%w: process %d has ended", errPeer, pid)
	}
	return pid, nil
}

// parentOf reads the parent from /proc/PID/stat, where it is the second field after the name in parentheses.
func parentOf(pid int) (int, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("process %d: unreadable stat", pid)
	}
	return strconv.Atoi(string(fields[1]))
}

func processGone(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }
