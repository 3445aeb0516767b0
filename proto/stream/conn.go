// Package stream is the byte stream's wire rules: hello, upgrade, relay, and HTTP/2 with the roles turned round.
package stream

import (
	"io"
	"net"
)

// Protocol is the token of the Upgrade header that opens a byte stream.
const Protocol = "carrel"

// prefixConn gives bytes that were read too early before those of its Conn.
// Relay unwraps it, so that the prefix costs nothing once it is delivered.
type prefixConn struct {
	net.Conn
	prefix []byte
}

func (c *prefixConn) Read(p []byte) (int, error) {
	if len(c.prefix) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.prefix)
	c.prefix = c.prefix[n:]
	if len(c.prefix) == 0 {
		c.prefix = nil
	}
	return n, nil
}

// NetConn returns the connection without the prefix.
func (c *prefixConn) NetConn() net.Conn { return c.Conn }

func (c *prefixConn) CloseWrite() error {
	if w, ok := c.Conn.(closeWriter); ok {
		return w.CloseWrite()
	}
	return c.Close()
}

type closeWriter interface{ CloseWrite() error }

type netConner interface{ NetConn() net.Conn }

// bottom returns the connection under TLS and our own wrappers: the one that
// has a file descriptor.
func bottom(c net.Conn) net.Conn {
	for {
		w, ok := c.(netConner)
		if !ok {
			return c
		}
		c = w.NetConn()
	}
}

// abort closes c at once and so that the peer sees a failure, not an orderly
// end: a reset on TCP, no close_notify on TLS. Nothing that waits to be sent
// holds memory afterwards.
func abort(c net.Conn) {
	raw := bottom(c)
	if t, ok := raw.(interface{ SetLinger(sec int) error }); ok {
		_ = t.SetLinger(0) // a dead socket is as good
	}
	_ = raw.Close()
}

// readHead reads an HTTP head byte by byte up to and with its empty line, so
// that no byte behind it is taken. It gives up after limit bytes.
func readHead(r io.Reader, limit int) ([]byte, error) {
	head := make([]byte, 0, 512)
	var one [1]byte
	for len(head) < limit {
		if _, err := io.ReadFull(r, one[:]); err != nil {
			if len(head) > 0 && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return head, err
		}
		head = append(head, one[0])
		if n := len(head); one[0] == '\n' && n >= 4 && string(head[n-4:]) == "\r\n\r\n" {
			return head, nil
		}
	}
	return head, errHeadTooLong
}
