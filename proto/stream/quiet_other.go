//go:build !unix

package stream

import "net"

// Quiet cannot tell here, and says that c is.
func Quiet(net.Conn) bool { return true }
