package stream

import (
	"fmt"
	"net"
	"time"
)

// DefaultDeadPeer is the time in which a peer that vanished without a word is
// found out on an otherwise silent connection.
const DefaultDeadPeer = 45 * time.Second

// keepAliver is what *net.TCPConn has.
type keepAliver interface {
	SetKeepAliveConfig(config net.KeepAliveConfig) error
}

// SetDeadPeer makes the kernel end c when its peer has not answered for d (0:
// DefaultDeadPeer): by keep-alive probes while the line is silent and, on
// Linux, by TCP_USER_TIMEOUT while something waits to be acknowledged, which
// probes alone do not cover. Dial and Accept call it with their default; call
// it again to choose another time. Connections other than TCP are left alone.
func SetDeadPeer(c net.Conn, d time.Duration) error {
	if d <= 0 {
		d = DefaultDeadPeer
	}
	raw, ok := bottom(c).(keepAliver)
	if !ok {
		return nil
	}
	// Silent for a third, then four probes, all before d.
	idle, interval := max(d/3, time.Second), max(d/6, time.Second)
	err := raw.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: idle, Interval: interval, Count: 4})
	if err != nil {
		return fmt.Errorf("set keep-alive: %w", err)
	}
	if err := setUserTimeout(raw, d-interval); err != nil {
		return fmt.Errorf("set user timeout: %w", err)
	}
	return nil
}
