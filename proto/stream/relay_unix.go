//go:build unix

package stream

import (
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// rawWay holds the file descriptors' side of a way: a source that can be
// waited for without a buffer, and a sink that shows each partial write.
type rawWay struct {
	read  syscall.RawConn // nil where the source is no plain socket
	write syscall.RawConn // nil where the sink is no plain socket
}

func (r *rawWay) init(src, dst net.Conn) { r.read, r.write = rawSocket(src), rawSocket(dst) }
func (r *rawWay) usable() bool           { return r.read != nil }
func (r *rawWay) writable() bool         { return r.write != nil }

// rawSocket returns the descriptor of a TCP or unix stream socket. Anything
// else, in particular what wraps one, gets nil: its bytes are not the socket's.
func rawSocket(c net.Conn) syscall.RawConn {
	var sc syscall.Conn
	switch c := c.(type) {
	case *net.TCPConn:
		sc = c
	case *net.UnixConn:
		if c.LocalAddr().Network() != "unix" {
			return nil
		}
		sc = c
	default:
		return nil
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return rc
}

// reader reads once there is something to read, and takes its buffer then.
type reader struct {
	rc     syscall.RawConn
	buf    *[bigBuffer]byte // held only between fill and release
	n      int
	err    error
	waited bool
	try    func(fd uintptr) bool
}

func newReader(rc syscall.RawConn) *reader {
	r := &reader{rc: rc}
	r.try = r.tryRead
	return r
}

func (r *reader) tryRead(fd uintptr) bool {
	if r.buf == nil {
		r.buf = buffers.Get().(*[bigBuffer]byte)
	}
	r.n, r.err = ignoringEINTR(func() (int, error) { return syscall.Read(int(fd), r.buf[:]) })
	if r.err == syscall.EAGAIN {
		r.release()
		r.waited = true
		return false
	}
	return true
}

// fill blocks until there are bytes. waited tells whether there were none.
func (r *reader) fill() (p []byte, waited bool, err error) {
	r.waited = false
	err = r.rc.Read(r.try)
	switch {
	case err != nil:
	case r.err != nil:
		err = os.NewSyscallError("read", r.err)
	case r.n == 0:
		err = io.EOF
	}
	if err != nil {
		r.release()
		return nil, r.waited, err
	}
	return r.buf[:r.n], r.waited, nil
}

func (r *reader) release() {
	if r.buf != nil {
		buffers.Put(r.buf)
		r.buf = nil
	}
}

// runRaw is the lazy relay: no buffer while idle, splice where it pays.
func (w *way) runRaw() error {
	r := newReader(w.raw.read)
	bulk := w.spliceAfter >= 0 && canSplice && w.raw.writable()
	var run int64 // bytes since the last pause
	last := time.Now()
	for {
		p, waited, err := r.fill()
		if err != nil {
			return readEnd(err)
		}
		if waited {
			if now := time.Now(); now.Sub(last) >= pause {
				run = 0
			}
		}
		err = w.write(p)
		r.release()
		if err != nil {
			return err
		}
		last = time.Now()
		run += int64(len(p))
		if !bulk || run < w.spliceAfter {
			continue
		}
		run = 0
		if bulk, err = w.splice(); err != nil {
			return readEnd(err)
		}
		last = time.Now()
	}
}

// writeRaw delivers p and counts each part that the kernel takes, which is
// what tells a slow peer from one that stopped.
func (w *way) writeRaw(p []byte) error {
	var n int
	var werr error
	armed := false
	for len(p) > 0 {
		err := w.raw.write.Write(func(fd uintptr) bool {
			n, werr = ignoringEINTR(func() (int, error) { return syscall.Write(int(fd), p) })
			if werr == syscall.EAGAIN {
				if !armed {
					armed = true
					w.stall.arm()
				}
				return false
			}
			return true
		})
		if err == nil && werr != nil {
			err = os.NewSyscallError("write", werr)
		}
		if err != nil {
			if armed {
				w.stall.disarm()
			}
			return w.writeFailure(err)
		}
		w.advance(int64(n))
		p = p[n:]
	}
	if armed {
		w.stall.disarm()
	}
	return nil
}

func (w *way) advance(n int64) {
	w.stall.own.Add(uint64(n))
	w.count(n)
}

func ignoringEINTR(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != syscall.EINTR {
			return n, err
		}
	}
}
