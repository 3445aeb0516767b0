package stream

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/proto/stream/streamtest"
)

// turn serves h on p.near, which stands for the side that dialled.
func turn(t *testing.T, p pair, h http.Handler, o TurnedOptions) (*Turned, <-chan error) {
	t.Helper()
	served := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { served <- ServeTurned(ctx, p.near, h, o) }()
	tr, err := NewTurnedTransport(p.far, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); tr.Close() })
	return tr, served
}

func TestTurnedCallsOverPlainAndTLS(t *testing.T) {
	for name, kind := range pairKinds {
		t.Run(name, func(t *testing.T) {
			body := noise(8, 3<<19) // more than a window
			tr, served := turn(t, kind(t), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.ProtoMajor != 2 {
					t.Errorf("proto %s", r.Proto)
				}
				_, _ = io.Copy(w, r.Body)
			}), TurnedOptions{})
			c := &http.Client{Transport: tr}
			var calls sync.WaitGroup
			for range 8 { // at once, the first ones too
				calls.Go(func() {
					resp, err := c.Post("http://host/x", "", bytes.NewReader(body))
					if err != nil {
						t.Error(err)
						return
					}
					defer resp.Body.Close()
					if got, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(got, body) {
						t.Errorf("%d bytes, %v", len(got), err)
					}
				})
			}
			calls.Wait()
			tr.Close()
			await(t, tr.Done(), "done")
			if err := await(t, served, "served"); !errors.Is(err, ErrTurnedEnded) {
				t.Errorf("served: %v", err)
			}
			if _, err := c.Get("http://host/"); err == nil {
				t.Error("a call over a closed connection worked")
			}
		})
	}
}

// A call that waits must end with its side, and ServeTurned only after it.
func TestTurnedEndsCallsFromBothSides(t *testing.T) {
	for name, end := range map[string]func(cancel context.CancelFunc, tr *Turned, p pair){
		"server's context": func(cancel context.CancelFunc, _ *Turned, _ pair) { cancel() },
		"client's close":   func(_ context.CancelFunc, tr *Turned, _ pair) { tr.Close() },
		"broken line":      func(_ context.CancelFunc, _ *Turned, p pair) { abort(p.near) },
	} {
		t.Run(name, func(t *testing.T) {
			p := tlsPair(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			entered, left := make(chan struct{}), make(chan struct{})
			h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				close(entered)
				<-r.Context().Done()
				close(left)
			})
			served := make(chan error, 1)
			go func() { served <- ServeTurned(ctx, p.near, h, TurnedOptions{}) }()
			tr, err := NewTurnedTransport(p.far, TurnedOptions{})
			if err != nil {
				t.Fatal(err)
			}
			called := make(chan error, 1)
			go func() {
				_, err := (&http.Client{Transport: tr}).Get("http://host/")
				called <- err
			}()
			await(t, entered, "call")
			end(cancel, tr, p)
			if err := await(t, called, "call's end"); err == nil {
				t.Error("call succeeded")
			}
			await(t, served, "served")
			select {
			case <-left:
			default:
				t.Error("ServeTurned returned before its call")
			}
			await(t, tr.Done(), "done")
		})
	}
}

// A peer that is there but says nothing (stopped, or behind a dropped route)
// is found by the pings of either side.
func TestTurnedFindsADeadPeer(t *testing.T) {
	o := TurnedOptions{PingAfter: 100 * time.Millisecond, PingTimeout: 100 * time.Millisecond}
	t.Run("gateway finds dead agent", func(t *testing.T) {
		p := tcpPair(t)
		tr, err := NewTurnedTransport(p.far, o)
		if err != nil {
			t.Fatal(err)
		}
		await(t, tr.Done(), "done")
	})
	t.Run("agent finds dead gateway", func(t *testing.T) {
		p := tcpPair(t)
		served := make(chan error, 1)
		go func() { served <- ServeTurned(t.Context(), p.near, http.NotFoundHandler(), o) }()
		if err := await(t, served, "served"); !errors.Is(err, ErrTurnedEnded) {
			t.Fatal(err)
		}
	})
	t.Run("agent finds gateway dead after a call", func(t *testing.T) {
		p, frozen := tcpPair(t), tcpPair(t)
		ctx, freeze := context.WithCancel(t.Context())
		between := &freezer{ctx: ctx, a: p.far, b: frozen.near}
		defer between.wait()
		between.start()
		served := make(chan error, 1)
		go func() { served <- ServeTurned(t.Context(), p.near, http.NotFoundHandler(), o) }()
		tr, err := NewTurnedTransport(frozen.far, o)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: tr}).Get("http://host/")
		if err != nil || resp.StatusCode != 404 {
			t.Fatal(resp, err)
		}
		resp.Body.Close()
		freeze()
		await(t, served, "served")
		await(t, tr.Done(), "done")
	})
}

func TestTurnedLeavesNothingBehind(t *testing.T) {
	server, client := streamtest.TLS(t)
	client.ServerName = "localhost"
	goroutines, fds := runtime.NumGoroutine(), streamtest.FDs(t)
	for range 20 {
		raw := tcpPair(t)
		p := pair{tls.Client(raw.near, client), tls.Server(raw.far, server)}
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- ServeTurned(ctx, p.near, http.NotFoundHandler(), TurnedOptions{}) }()
		tr, err := NewTurnedTransport(p.far, TurnedOptions{})
		if err != nil {
			t.Fatal(err)
		}
		resp, err := tr.RoundTrip(mustRequest(t))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		cancel()
		if err := await(t, served, "served"); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		await(t, tr.Done(), "done")
	}
	streamtest.Settled(t, goroutines, fds)
}

func mustRequest(t *testing.T) *http.Request {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://host/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// freezer carries bytes until its context ends, and then holds both
// connections open without a word.
type freezer struct {
	ctx  context.Context
	a, b net.Conn
	wg   sync.WaitGroup
}

func (f *freezer) start() {
	carry := func(from, to net.Conn) {
		buf := make([]byte, 4096)
		for f.ctx.Err() == nil {
			n, err := from.Read(buf)
			if err != nil || f.ctx.Err() != nil {
				return
			}
			_, _ = to.Write(buf[:n])
		}
	}
	f.wg.Go(func() { carry(f.a, f.b) })
	f.wg.Go(func() { carry(f.b, f.a) })
}

func (f *freezer) wait() {
	f.a.Close()
	f.b.Close()
	f.wg.Wait()
}
