package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/link"
	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/proto/stream/streamtest"
	"github.com/carrel-dev/carrel/services/tunnel"
)

// both runs f plain and over TLS 1.3.
func both(t *testing.T, f func(t *testing.T, secure bool)) {
	t.Run("plain", func(t *testing.T) { f(t, false) })
	t.Run("tls", func(t *testing.T) { f(t, true) })
}

func TestBytesArriveEqualBothWaysAtOnce(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{})
		r.agent(1)
		r.expect("up h1 1")
		up, down := noise(1, bulkSize), noise(2, bulkSize)

		t.Run("echo", func(t *testing.T) { exchange(t, r.mustDial("echo"), up, up) })
		t.Run("duplex", func(t *testing.T) { exchange(t, r.mustDial("duplex"), up, down) })
		streamtest.Eventually(t, "no stream is live", func() bool { return r.tunnel.Stats().Streams == 0 })
		s := r.tunnel.Stats()
		if s.Up != 2*bulkSize || s.Down != 2*bulkSize || s.Opened != 2 {
			t.Errorf("metrics: %+v", s)
		}
	})
}

// exchange sends, half-closes, and compares what comes back meanwhile.
func exchange(t *testing.T, c net.Conn, send, want []byte) {
	t.Helper()
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(60 * time.Second))
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(send)
		if err == nil {
			err = c.(closeWriter).CloseWrite()
		}
		sent <- err
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes back, want %d, %v", len(got), len(want), err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

func TestHalfCloseTravelsTheWholeWay(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{})
		r.agent(1)
		r.expect("up h1 1")
		exchange(t, r.mustDial("swap"), noise(1, 100_000), noise(9, 300_017))
	})
}

func TestAThousandStreamsLeaveNothingBehind(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{MaxPerUser: -1})
		l := r.agent(1)
		r.expect("up h1 1")
		settled := func() bool {
			return l.State().Ready == link.DefaultStreams && r.tunnel.Stats().Pooled == link.DefaultStreams
		}
		streamtest.Eventually(t, "pool is full", settled)
		goroutines, fds := runtime.NumGoroutine(), streamtest.FDs(t)

		var workers sync.WaitGroup
		for w := range 20 {
			workers.Go(func() {
				for i := range 50 {
					conn, err := r.dial("echo")
					if err == nil {
						err = echo(conn, fmt.Sprintf("%d of %d", i, w))
						conn.Close()
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		workers.Wait()
		if n := r.tunnel.Stats().Opened; n != 1000 {
			t.Errorf("%d streams were opened", n)
		}
		// Streams that were asked for and not needed may wait in the pools.
		most := tunnel.DefaultPoolSize - link.DefaultStreams
		streamtest.Eventually(t, "streams are gone", func() bool {
			return r.tunnel.Stats().Streams == 0 && l.State().Active == 0
		})
		streamtest.Settled(t, goroutines+most, fds+2*most)
	})
}

func TestStreamsOutliveTheLinkAndItComesBack(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{})
		l := r.agent(1)
		r.expect("up h1 1")
		old := r.mustDial("echo")
		defer old.Close()
		if err := echo(old, "before"); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			killed := time.Now()
			r.breakLink()
			r.expect("down h1 1")
			r.expect("up h1 1")
			if d := time.Since(killed); d > 15*time.Second {
				t.Errorf("back after %v", d)
			}
			if err := echo(old, "still there"); err != nil {
				t.Fatal(err)
			}
			fresh := r.mustDial("echo")
			if err := echo(fresh, "new"); err != nil {
				t.Fatal(err)
			}
			fresh.Close()
		}
		if s := l.State(); !s.Connected || s.LastError == nil || s.Since.IsZero() {
			t.Errorf("state %+v", s)
		}
	})
}

func TestNewestSessionWins(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{})
		old := r.agent(1)
		r.expect("up h1 1")
		newer := r.agent(2)
		r.expect("up h1 2")
		streamtest.Eventually(t, "newer agent is ready", func() bool { return newer.State().Ready > 0 })
		if err := old.wait(); !errors.Is(err, link.ErrNewerSession) {
			t.Errorf("old agent: %v", err)
		}
		c := r.mustDial("echo")
		defer c.Close()
		if err := echo(c, "to the newer"); err != nil || newer.State().Active != 1 {
			t.Errorf("%v, %+v", err, newer.State())
		}
	})
}

func TestRevokedMeansCut(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{})
		r.agent(1)
		r.expect("up h1 1")
		for what, cut := range map[string]func() int{
			"user":      func() int { return r.tunnel.CloseUser("ann", errors.New("revoked")) },
			"workspace": func() int { return r.tunnel.CloseWorkspace("w1", errors.New("stopped")) },
		} {
			c := r.mustDial("echo")
			if err := echo(c, "hi"); err != nil {
				t.Fatal(err)
			}
			// A relay counts right after it has delivered.
			streamtest.Eventually(t, "live set knows the stream and its bytes", func() bool {
				return r.tunnel.Live("w1") == (tunnel.Live{Streams: 1, Up: 2, Down: 2})
			})
			if n := cut(); n != 1 {
				t.Errorf("%s: %d cut", what, n)
			}
			_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
			if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
				t.Errorf("%s: stream lives on: %v", what, err)
			}
			c.Close()
			streamtest.Eventually(t, "gone", func() bool { return r.tunnel.Stats().Streams == 0 })
		}
	})
}

func TestAUserThatStopsReadingIsEnded(t *testing.T) {
	both(t, func(t *testing.T, secure bool) {
		r := newRig(t, secure, tunnel.Options{Relay: stream.RelayOptions{WriteStall: 300 * time.Millisecond}})
		l := r.agent(1)
		r.expect("up h1 1")
		stopped := r.mustDial("duplex") // 64 MiB come that nobody reads
		defer stopped.Close()
		streamtest.Eventually(t, "it is live", func() bool { return r.tunnel.Live("w1").Down > 0 })
		good := r.mustDial("echo")
		defer good.Close()
		streamtest.Eventually(t, "the stopped one is ended", func() bool {
			if err := echo(good, "and the others go on"); err != nil {
				t.Fatal(err)
			}
			return r.tunnel.Stats().Streams == 1 && l.State().Active == 1
		})
	})
}

// R-11, T-27: five hundred users who read nothing of an endless stream cost a
// bounded amount of memory, in gateway and agent together, and harm nobody.
func TestManyStoppedReadersAreBounded(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	r := newRig(t, false, tunnel.Options{MaxPerUser: -1})
	l := r.agent(1)
	r.expect("up h1 1")
	good := r.mustDial("echo")
	defer good.Close()
	if err := echo(good, "hi"); err != nil {
		t.Fatal(err)
	}
	before := resident(t)
	stopped, limit := 500, 150.0 // MiB
	if raceDetector {            // whose shadow memory is many times the program's
		stopped = 50
	}
	conns := make([]net.Conn, stopped)
	for i := range conns {
		c := r.mustDial("flood")
		defer c.Close()
		// A small window, so that the flood stops in the relays and not in
		// the kernel's buffers.
		if err := c.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil {
			t.Fatal(err)
		}
		conns[i] = c
	}
	streamtest.Eventually(t, "all have stopped", func() bool {
		if err := echo(good, "the others go on"); err != nil {
			t.Fatal(err)
		}
		return r.tunnel.Live("w1").Streams == stopped+1 && l.State().Active == stopped+1 && quietFor(r, 200*time.Millisecond)
	})
	grown := (resident(t) - before) / 1024
	t.Logf("%d stopped readers take %.0f MiB", stopped, grown)
	if grown > limit {
		t.Errorf("more than %.0f MiB", limit)
	}
}

// quietFor is true when next to nothing flows for d.
func quietFor(r *rig, d time.Duration) bool {
	before := r.tunnel.Stats().Down
	<-time.After(d)
	return r.tunnel.Stats().Down-before < 1<<10
}

func TestGatewayThatIsAwayAndHostThatIsAway(t *testing.T) {
	r := newRig(t, false, tunnel.Options{})
	if _, err := r.dial("echo"); err == nil || !strings.Contains(err.Error(), "not connected") {
		t.Errorf("without a host: %v", err)
	}
	a := r.agent(1)
	r.expect("up h1 1")
	if err := a.stop(); err == nil {
		t.Error("Run returned nil")
	}
	r.expect("down h1 1")
	if _, err := r.dial("echo"); err == nil {
		t.Error("a stream to a host that left")
	}
	var se *stream.StatusError
	_, err := r.dial("echo")
	if !errors.As(err, &se) || se.Code != http.StatusServiceUnavailable {
		t.Errorf("%v", err)
	}
}
