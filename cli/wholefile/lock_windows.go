package wholefile

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/windows"
)

const (
	lockPoll = 20 * time.Millisecond // how often a lock that another process holds is tried again
	lockWait = 45 * time.Second      // for how long; who holds it has work of milliseconds, a sign-in of one call
)

// Lock takes the lock file at path, which it makes where it is missing, and waits while another process has it. The
// system gives it back when the holder dies.
func Lock(ctx context.Context, path string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	const flags = windows.LOCKFILE_EXCLUSIVE_LOCK | windows.LOCKFILE_FAIL_IMMEDIATELY
	for {
		err := windows.LockFileEx(windows.Handle(f.Fd()), flags, 0, 1, 0, &windows.Overlapped{})
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if err != windows.ERROR_LOCK_VIOLATION {
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

// syncDir does nothing: Windows does not open directories for that.
func syncDir(string) error { return nil }
