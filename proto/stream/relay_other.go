//go:build !unix

package stream

import "net"

// rawWay is empty here: every source is read with the small buffer.
type rawWay struct{}

func (*rawWay) init(_, _ net.Conn) {}
func (*rawWay) usable() bool       { return false }
func (*rawWay) writable() bool     { return false }

func (w *way) runRaw() error         { return w.runBuffered() }
func (w *way) writeRaw([]byte) error { panic("stream: no raw sockets here") }
