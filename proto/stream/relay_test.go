package stream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/proto/stream/streamtest"
)

type relayResult struct {
	stats Stats
	err   error
}

func startRelay(ctx context.Context, a, b net.Conn, o RelayOptions) <-chan relayResult {
	done := make(chan relayResult, 1)
	go func() {
		s, err := Relay(ctx, a, b, o)
		done <- relayResult{s, err}
	}()
	return done
}

func await[T any](tb testing.TB, c <-chan T, what string) T {
	tb.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		buf := make([]byte, 1<<16)
		tb.Fatalf("%s: not within 20 s\n%s", what, buf[:runtime.Stack(buf, true)])
		panic("unreachable")
	}
}

func TestRelayDeliversBothWaysAtOnce(t *testing.T) {
	const size = 4 << 20 // four times what starts splice; 64 MiB go the whole way in e2e
	for nameA, kindA := range pairKinds {
		for nameB, kindB := range pairKinds {
			t.Run(nameA+"-"+nameB, func(t *testing.T) {
				up, down := noise(1, size), noise(2, size)
				a, b := kindA(t), kindB(t)
				var liveUp atomic.Int64
				done := startRelay(t.Context(), a.far, b.near, RelayOptions{AToB: &liveUp})
				sentUp, sentDown := sendAll(a.near, up), sendAll(b.far, down)
				gotDown, gotUp := readAll(a.near), readAll(b.far)
				if r := await(t, gotUp, "up"); r.err != nil || !bytes.Equal(r.data, up) {
					t.Errorf("up: %d bytes, %v", len(r.data), r.err)
				}
				if r := await(t, gotDown, "down"); r.err != nil || !bytes.Equal(r.data, down) {
					t.Errorf("down: %d bytes, %v", len(r.data), r.err)
				}
				for _, c := range []<-chan error{sentUp, sentDown} {
					if err := await(t, c, "send"); err != nil {
						t.Error(err)
					}
				}
				r := await(t, done, "relay")
				if r.err != nil || r.stats != (Stats{size, size}) || liveUp.Load() != size {
					t.Errorf("relay: %+v live %d", r, liveUp.Load())
				}
			})
		}
	}
}

func TestRelayCarriesHalfCloses(t *testing.T) {
	for name, kind := range pairKinds {
		t.Run(name, func(t *testing.T) {
			a, b := kind(t), tcpPair(t)
			done := startRelay(t.Context(), a.far, b.near, RelayOptions{})
			sent := sendAll(a.near, noise(3, 100_000))
			in, err := io.ReadAll(b.far) // ends only by the half-close
			if err != nil || len(in) != 100_000 {
				t.Fatalf("in: %d bytes, %v", len(in), err)
			}
			if err := await(t, sent, "send"); err != nil {
				t.Fatal(err)
			}
			answered := sendAll(b.far, noise(4, 300_017))
			out := await(t, readAll(a.near), "answer")
			if out.err != nil || !bytes.Equal(out.data, noise(4, 300_017)) {
				t.Fatalf("out: %d bytes, %v", len(out.data), out.err)
			}
			if err := await(t, answered, "answer sent"); err != nil {
				t.Fatal(err)
			}
			if r := await(t, done, "relay"); r.err != nil || r.stats != (Stats{100_000, 300_017}) {
				t.Fatalf("relay: %+v", r)
			}
		})
	}
}

func TestRelayDeliversThePrefixFirst(t *testing.T) {
	a, b := tcpPair(t), tcpPair(t)
	done := startRelay(t.Context(), &prefixConn{Conn: a.far, prefix: []byte("SSH-")}, b.near, RelayOptions{})
	sent := sendAll(a.near, []byte("2.0"))
	if r := await(t, readAll(b.far), "read"); string(r.data) != "SSH-2.0" {
		t.Fatalf("%q, %v", r.data, r.err)
	}
	if err := await(t, sent, "send"); err != nil {
		t.Fatal(err)
	}
	b.far.Close()
	if r := await(t, done, "relay"); r.err != nil {
		t.Fatal(r.err)
	}
}

func TestRelayEndsWithItsContextAndCause(t *testing.T) {
	for name, kind := range pairKinds {
		t.Run(name, func(t *testing.T) {
			revoked := errors.New("revoked")
			ctx, cancel := context.WithCancelCause(t.Context())
			a, b := kind(t), kind(t)
			done := startRelay(ctx, a.far, b.near, RelayOptions{})
			cancel(revoked)
			if r := await(t, done, "relay"); !errors.Is(r.err, revoked) {
				t.Fatalf("err %v", r.err)
			}
			if _, err := a.near.Read(make([]byte, 1)); err == nil {
				t.Fatal("the client's side lives on")
			}
		})
	}
}

func TestRelayEndsWithItsContextWhileAPeerReadsNothing(t *testing.T) {
	for name, kind := range pairKinds {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			a, b := tcpPair(t), kind(t)
			var moved atomic.Int64
			done := startRelay(ctx, a.far, b.near, RelayOptions{AToB: &moved})
			flooded := flood(a.near)
			awaitStill(t, &moved)
			cancel()
			start := time.Now()
			if r := await(t, done, "relay"); !errors.Is(r.err, context.Canceled) {
				t.Fatalf("err %v", r.err)
			}
			if d := time.Since(start); d > 2*time.Second {
				t.Errorf("took %v", d)
			}
			a.near.Close()
			await(t, flooded, "flood")
		})
	}
}

func TestRelayGivesUpAPeerThatStopsReading(t *testing.T) {
	const limit = 400 * time.Millisecond
	for name, kind := range pairKinds {
		for _, source := range []string{"tcp", "tls"} {
			t.Run(source+"-"+name, func(t *testing.T) {
				a, b := pairKinds[source](t), kind(t)
				done := startRelay(t.Context(), a.far, b.near, RelayOptions{WriteStall: limit})
				flooded := flood(a.near)
				start := time.Now()
				r := await(t, done, "relay")
				if !errors.Is(r.err, ErrStalled) {
					t.Fatalf("err %v", r.err)
				}
				if d := time.Since(start); d < limit {
					t.Errorf("gave up after %v", d)
				}
				a.near.Close()
				await(t, flooded, "flood")
			})
		}
	}
}

func TestRelayKeepsAPeerThatReadsSlowly(t *testing.T) {
	const limit = 300 * time.Millisecond
	for name, kind := range pairKinds {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			a, b := tcpPair(t), kind(t)
			// A receiver says nothing before a part of its buffer is free, so
			// a big one hides that it reads.
			if c, ok := bottom(b.far).(*net.TCPConn); ok {
				if err := c.SetReadBuffer(64 << 10); err != nil {
					t.Fatal(err)
				}
			}
			done := startRelay(ctx, a.far, b.near, RelayOptions{WriteStall: limit})
			flooded := flood(a.near)
			tick := time.NewTicker(limit / 10)
			defer tick.Stop()
			buf := make([]byte, 128<<10)
			for range 60 { // six limits long, never fast enough to empty the buffers
				<-tick.C
				if _, err := b.far.Read(buf); err != nil {
					t.Fatalf("cut off although it reads: %v", err)
				}
			}
			cancel()
			if r := await(t, done, "relay"); !errors.Is(r.err, context.Canceled) {
				t.Fatalf("err %v", r.err)
			}
			a.near.Close()
			await(t, flooded, "flood")
		})
	}
}

func TestRelayPassesAResetOn(t *testing.T) {
	a, b := tcpPair(t), tcpPair(t)
	done := startRelay(t.Context(), a.far, b.near, RelayOptions{})
	abort(b.far)
	if _, err := io.ReadAll(a.near); err == nil {
		t.Error("a broken stream ended like a whole one")
	}
	if r := await(t, done, "relay"); r.err == nil {
		t.Error("relay knows of no failure")
	}
}

func TestRelayReportsATruncatedTLSStream(t *testing.T) {
	a, b := tlsPair(t), tcpPair(t)
	done := startRelay(t.Context(), a.far, b.near, RelayOptions{})
	_, _ = bottom(a.near).Write([]byte("\x17\x03\x03")) // half a record's header
	bottom(a.near).Close()
	if _, err := io.ReadAll(b.far); err == nil {
		t.Error("a truncated stream ended like a whole one")
	}
	if r := await(t, done, "relay"); !errors.Is(r.err, io.ErrUnexpectedEOF) {
		t.Errorf("err %v", r.err)
	}
}

func TestRelayWithoutHalfCloseEndsWhole(t *testing.T) {
	near, far := net.Pipe()
	b := tcpPair(t)
	done := startRelay(t.Context(), far, b.near, RelayOptions{})
	go func() { _, _ = near.Write([]byte("hi")) }()
	got := make([]byte, 2)
	if _, err := io.ReadFull(b.far, got); err != nil || string(got) != "hi" {
		t.Fatalf("%q %v", got, err)
	}
	b.far.Close()
	if r := await(t, done, "relay"); r.err != nil || r.stats.AToB != 2 {
		t.Fatalf("%+v", r)
	}
	if _, err := near.Read(got); err != io.EOF {
		t.Fatalf("pipe: %v", err)
	}
}

func TestRelayDeliversLastWordsOfASideThatStopsReading(t *testing.T) {
	a, b := tcpPair(t), unixPair(t)
	done := startRelay(t.Context(), a.far, b.near, RelayOptions{})
	if err := b.far.(*net.UnixConn).CloseRead(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.near.Write([]byte("unwanted")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.far.Write([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	b.far.Close()
	if r := await(t, readAll(a.near), "read"); string(r.data) != "last words" {
		t.Fatalf("%q, %v", r.data, r.err)
	}
	if r := await(t, done, "relay"); !errors.Is(r.err, syscall.EPIPE) {
		t.Fatalf("err %v", r.err)
	}
}

func TestRelayLeavesNothingBehind(t *testing.T) {
	goroutines, fds := runtime.NumGoroutine(), streamtest.FDs(t)
	for range 100 {
		a, b := tcpPair(t), tcpPair(t)
		done := startRelay(t.Context(), a.far, b.near, RelayOptions{SpliceAfter: 1})
		sent := sendAll(a.near, noise(5, 1<<20))
		if r := await(t, readAll(b.far), "read"); len(r.data) != 1<<20 {
			t.Fatal(r.err)
		}
		b.far.Close()
		if r := await(t, done, "relay"); r.err != nil {
			t.Fatal(r.err)
		}
		if err := await(t, sent, "send"); err != nil {
			t.Fatal(err)
		}
		a.near.Close()
	}
	streamtest.Settled(t, goroutines, fds)
}

// A way that was bulk once must serve keystrokes again, and give its pipe back.
func TestRelayGoesBackFromSpliceToLazy(t *testing.T) {
	a, b := tcpPair(t), tcpPair(t)
	fds := streamtest.FDs(t)
	done := startRelay(t.Context(), a.far, b.near, RelayOptions{})
	bulk := noise(6, 8<<20)
	for range 3 {
		go func() { _, _ = a.near.Write(bulk) }()
		got := make([]byte, len(bulk))
		if _, err := io.ReadFull(b.far, got); err != nil || !bytes.Equal(got, bulk) {
			t.Fatal(err)
		}
		streamtest.Eventually(t, "no pipe while idle", func() bool { return streamtest.FDs(t) == fds })
		for i := range 20 {
			if _, err := a.near.Write([]byte{byte(i)}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(b.far, got[:1]); err != nil || got[0] != byte(i) {
				t.Fatal(got[0], err)
			}
		}
	}
	a.near.Close()
	b.far.Close()
	if r := await(t, done, "relay"); r.err != nil {
		t.Fatal(r.err)
	}
}

// flood writes until the connection fails.
func flood(c net.Conn) <-chan error {
	done := make(chan error, 1)
	go func() {
		p := noise(7, 256<<10)
		for {
			if _, err := c.Write(p); err != nil {
				done <- err
				return
			}
		}
	}()
	return done
}

// awaitStill waits until n has begun to grow and then stopped for a while.
func awaitStill(tb testing.TB, n *atomic.Int64) {
	tb.Helper()
	last, since := int64(0), time.Now()
	streamtest.Eventually(tb, "flow stops", func() bool {
		if now := n.Load(); now != last {
			last, since = now, time.Now()
		}
		return last > 0 && time.Since(since) > 100*time.Millisecond
	})
}
