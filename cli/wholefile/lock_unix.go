//go:build unix

package wholefile

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	lockPoll = 20 * time.Millisecond // how often a lock that another process holds is tried again
	lockWait = 45 * time.Second      // for how long; who holds it has work of milliseconds, a sign-in of one call
)

// Lock takes the lock file at path, which it makes where it is missing, and waits while another process has it. The
// kernel gives it back when the holder dies.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: another carrel holds it: %w", path, context.Cause(ctx))
		case <-time.After(lockPoll):
		}
	}
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	_ = d.Sync() // some filesystems cannot; the rename is atomic without it
	return d.Close()
}
