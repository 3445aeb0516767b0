package initd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Descriptors that a session inherits, by number.
const (
	fdConnection    = 3 // the SSH connection
	fdControl       = 4 // its socket pair to serve
	fdSessionSummon = 5 // the sessions' end of the rendezvous
)

// spawnSession starts a session process as the workspace's user and gives its process id.
func spawnSession(cfg *configuration, conn *net.UnixConn, link *os.File, summon int) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("session connection: %w", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	groups := make([]uint32, 0, len(cfg.user.Groups))
	for _, g := range cfg.user.Groups {
		groups = append(groups, uint32(g.GID))
	}
	var pid int
	var forkErr error
	err = raw.Control(func(fd uintptr) {
		attr := &syscall.ProcAttr{
			Dir: "/", Env: runtimeEnv(),
			Files: []uintptr{null.Fd(), os.Stdout.Fd(), os.Stderr.Fd(), fd, link.Fd(), uintptr(summon)},
			Sys: &syscall.SysProcAttr{
				Setsid:     true,
				Credential: &syscall.Credential{Uid: uint32(cfg.user.UID), Gid: uint32(cfg.user.GID), Groups: groups},
			},
		}
		pid, forkErr = forkLimited(attr, !cfg.sudo)
	})
	if err := errors.Join(err, forkErr); err != nil {
		return 0, fmt.Errorf("start session: %w", err)
	}
	return pid, nil
}

// forkLimited forks on a thread of its own, which it first, for a workspace without sudo, forbids to gain any right: the
// kernel keeps both settings per thread, and children inherit them. The thread is thrown away.
func forkLimited(attr *syscall.ProcAttr, limit bool) (pid int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if limit {
			runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
			if err = dropRights(); err != nil {
				return
			}
		}
		pid, err = syscall.ForkExec("/proc/self/exe", []string{"carrel-init", "session"}, attr)
	}()
	<-done
	return pid, err
}

// dropRights empties the calling thread's bounding set and sets no_new_privs.
func dropRights() error {
	for c := range unix.CAP_LAST_CAP + 1 {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			continue // a kernel older than the capability
		}
		if err != nil {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}

// waitFor reaps one session process.
func waitFor(pid int) {
	var status syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(pid, &status, 0, nil); !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}
