//go:build unix

package stream

import (
	"net"
	"syscall"
)

// Quiet reports whether c is open and nothing has come in on it, without
// taking a byte: what a pooled connection must be whose peer does not speak
// first. It looks at the socket under TLS, so there it says false for a
// close_notify too. A connection without a descriptor counts as quiet.
func Quiet(c net.Conn) bool {
	sc, ok := bottom(c).(syscall.Conn)
	if !ok {
		return true
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = rc.Control(func(fd uintptr) {
		var one [1]byte
		_, err := ignoringEINTR(func() (int, error) {
			n, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
			return n, err
		})
		quiet = err == syscall.EAGAIN
	})
	return err == nil && quiet
}
