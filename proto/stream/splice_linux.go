package stream

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"
)

const (
	canSplice = true

	pipeSize   = 1 << 20 // asked for; the kernel may give less to a user with many pipes
	fSetPipeSz = 1031    // F_SETPIPE_SZ of linux/fcntl.h; not in package syscall

	// SPLICE_F_MOVE | SPLICE_F_NONBLOCK of linux/splice.h. Never blocking,
	// because the kernel holds the pipe while it waits; never F_MORE, which
	// delays the last bytes by 200 ms (golang/go#10948).
	spliceFlags = 0x1 | 0x2
)

// splice moves bytes from socket to socket within the kernel until the source
// pauses. The pipe lives only as long. again is false where splice does not
// work for this pair, so that it is not tried once more.
func (w *way) splice() (again bool, err error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		return true, nil // out of descriptors: copying needs none
	}
	defer func() {
		_ = syscall.Close(p[0])
		_ = syscall.Close(p[1])
	}()
	// Without the bigger size it only is slower.
	_, _, _ = syscall.Syscall(syscall.SYS_FCNTL, uintptr(p[1]), fSetPipeSz, pipeSize)
	for {
		n, err := w.drain(p[1])
		switch {
		case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOSYS):
			return false, nil // the pipe is empty: nothing is lost
		case isTimeout(err):
			return true, w.src.SetReadDeadline(time.Time{})
		case err != nil:
			return false, err
		case n == 0:
			return false, io.EOF
		}
		if err := w.pump(p[0], n); err != nil {
			return false, err
		}
	}
}

// drain fills the empty pipe from the source. It waits no longer than pause.
func (w *way) drain(pipe int) (n int64, err error) {
	var serr error
	var waiting bool
	rerr := w.raw.read.Read(func(fd uintptr) bool {
		n, serr = spliceOnce(int(fd), pipe, pipeSize)
		if serr == syscall.EAGAIN && !waiting {
			waiting = true
			serr = w.src.SetReadDeadline(time.Now().Add(pause))
			return serr != nil
		}
		return serr != syscall.EAGAIN
	})
	if rerr != nil {
		return 0, rerr
	}
	if waiting {
		if err := w.src.SetReadDeadline(time.Time{}); err != nil {
			return 0, err
		}
	}
	return n, os.NewSyscallError("splice", serr)
}

// pump empties the pipe, which holds n bytes, into the sink.
func (w *way) pump(pipe int, n int64) error {
	armed := false
	defer func() {
		if armed {
			w.stall.disarm()
		}
	}()
	for n > 0 {
		var moved int64
		var serr error
		err := w.raw.write.Write(func(fd uintptr) bool {
			moved, serr = spliceOnce(pipe, int(fd), int(n))
			if serr != syscall.EAGAIN {
				return true
			}
			if !armed {
				armed = true
				w.stall.arm()
			}
			return false
		})
		if err == nil && serr != nil {
			err = os.NewSyscallError("splice", serr)
		}
		if err == nil && moved == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			return w.writeFailure(err)
		}
		n -= moved
		w.advance(moved)
	}
	return nil
}

func spliceOnce(from, to, most int) (int64, error) {
	for {
		n, err := syscall.Splice(from, nil, to, nil, most, spliceFlags)
		if err != syscall.EINTR {
			return int64(n), err
		}
	}
}
