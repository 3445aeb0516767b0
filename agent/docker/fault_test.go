package docker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/host"
)

// fault is what happens to one call of the engine.
type fault string

const (
	faultError fault = "the engine answers 500"
	faultCut   fault = "the connection is cut before the engine hears of it"
	faultLost  fault = "the engine acts and its answer is lost"
	faultHang  fault = "no answer comes"
)

// door stands between an agent and its engine, and disturbs the n-th call.
type door struct {
	mu   sync.Mutex
	nth  int
	kind fault
	hits []string
}

func (d *door) set(nth int, kind fault) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nth, d.kind = nth, kind
}

func (d *door) next(r *http.Request) fault {
	if strings.Contains(r.URL.Path, "/events") || strings.HasSuffix(r.URL.Path, "/_ping") {
		return ""
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.nth--; d.nth != 0 {
		return ""
	}
	d.hits = append(d.hits, r.Method+" "+r.URL.Path)
	return d.kind
}

// openDoor serves the system's engine on a socket of its own.
func openDoor(t *testing.T) (*door, string) {
	t.Helper()
	d := &door{}
	socket := filepath.Join(t.TempDir(), "engine.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(engineHost(), "unix://"))
	}
	transport := &http.Transport{DialContext: dial}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", "engine" },
		Transport:     transport,
		FlushInterval: -1,
		ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	closing := make(chan struct{})
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch d.next(r) {
		case faultError:
			http.Error(w, `{"message":"a fault of the test"}`, http.StatusInternalServerError)
			return
		case faultCut:
			panic(http.ErrAbortHandler)
		case faultLost:
			body, err := io.ReadAll(r.Body)
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			out := r.Clone(context.WithoutCancel(r.Context()))
			out.RequestURI, out.URL.Scheme, out.URL.Host, out.Body = "", "http", "engine", io.NopCloser(bytes.NewReader(body))
			if answer, err := transport.RoundTrip(out); err == nil {
				io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
			panic(http.ErrAbortHandler)
		case faultHang:
			select {
			case <-r.Context().Done():
			case <-closing:
			}
			panic(http.ErrAbortHandler)
		}
		proxy.ServeHTTP(w, r)
	}), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		close(closing)
		server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return d, "unix://" + socket
}

// mute answers for carrel-init at once.
type mute struct{ dir string }

func (m mute) Prepare(k host.Key) (string, error) {
	dir := filepath.Join(m.dir, k.Container())
	return dir, os.MkdirAll(dir, 0o700)
}
func (mute) Attach(host.Key, int) error { return nil }
func (mute) Configure(context.Context, host.Key, host.InsideConfig) (host.InsideAnswer, error) {
	return host.InsideAnswer{Sudo: "yes"}, nil
}
func (mute) Stop(context.Context, host.Key, string, time.Duration) error { return nil }
func (mute) Forget(host.Key)                                             {}

// on the real engine, each call of a start and of a stop fails in each way. Nothing is leaked, and there is never a
// second container.
func TestR6RealEngine(t *testing.T) {
	d, socket := openDoor(t)
	network := "hosttest-" + word()
	open(t, func(o *docker.Options) { o.Network = network }) // removes the network
	client, err := docker.New(docker.Options{Host: socket, Network: network, Call: 2 * time.Second, Slow: 4 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	image, err := client.Image(t.Context(), busybox)
	if err != nil {
		t.Fatal(err)
	}
	h := newHost(t, client)
	workspace := word()
	t.Cleanup(func() { sweep(t, workspace) })
	stamp := host.Stamp{Database: 1}
	apply := func(runs ...host.Desired) {
		t.Helper()
		stamp.Generation++
		if _, err := h.Apply(t.Context(), stamp, host.Set{Runs: runs}); err != nil {
			t.Fatal(err)
		}
	}
	epoch := int64(0)
	for _, kind := range []fault{faultError, faultCut, faultLost, faultHang} {
		for nth := 1; nth <= 9; nth += map[fault]int{faultHang: 2}[kind] + 1 {
			epoch++
			run := host.Desired{
				Key: host.Key{Workspace: workspace, Epoch: epoch}, Goal: host.GoalRunning, Name: "demo", Owner: "ana", ImageReference: busybox,
				ImageDigest: image.ID, Identity: host.Identity{Login: "ana", UID: 54321, GID: 54321}, CPUMillis: 500, MemoryMiB: 64, ShmMiB: 16,
				PidsLimit: 64, StopGrace: time.Second,
			}
			d.set(nth, kind)
			apply(run)
			o := settle(t, h, run.Key, host.PhaseReady, host.PhaseGone)
			if o.Phase == host.PhaseGone && kind != faultError {
				t.Errorf("%s, call %d (%v): %+v", kind, nth, d.hits, o)
			}
			want := 1
			if o.Phase == host.PhaseGone {
				want = 0
			}
			if got := containers(t, workspace); len(got) != want {
				t.Errorf("%s, call %d (%v): at %s containers %v", kind, nth, d.hits, o.Phase, got)
			}
			d.set(nth, kind)
			run.Goal = host.GoalGone
			apply(run)
			settle(t, h, run.Key, host.PhaseGone)
			if got := containers(t, workspace); len(got) != 0 {
				t.Errorf("%s, call %d of the stop (%v): left %v", kind, nth, d.hits, got)
			}
			d.set(0, "")
			d.hits = nil
		}
	}
}

func newHost(t *testing.T, runtime host.Runtime) *host.Host {
	t.Helper()
	clock, err := host.SystemClock()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	journal, err := host.OpenJournal(dir, clock.Now())
	if err != nil {
		t.Fatal(err)
	}
	h, err := host.New(host.Options{
		DataDir: dir, InitFile: script(t, standIn), Signer: signer(t),
		Times: host.Times{Retry: 20 * time.Millisecond, RetryMost: 500 * time.Millisecond, List: time.Second, Heartbeat: time.Second},
		Log:   slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}, host.Parts{Runtime: unprobed{runtime}, GPUs: gpu.Null("test"), Inside: mute{t.TempDir()}, Clock: clock, Journal: journal})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
	})
	return h
}

// unprobed leaves out the probe, whose containers would disturb the count of calls.
type unprobed struct{ host.Runtime }

func (unprobed) Probe(context.Context, host.ProbeRequest) (host.ProbeResult, error) {
	return host.ProbeResult{}, nil
}

func settle(t *testing.T, h *host.Host, k host.Key, phases ...host.Phase) host.Observed {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	found := errors.New("found")
	var last host.Observed
	for ctx.Err() == nil {
		err := h.Observe(ctx, 0, 5*time.Second, func(b host.Batch) error {
			for _, o := range b.Runs {
				if o.Key != k {
					continue
				}
				last = o
				for _, p := range phases {
					if o.Phase == p {
						return found
					}
				}
			}
			return nil
		})
		if errors.Is(err, found) {
			return last
		}
	}
	t.Fatalf("run %s does not come to %v: %+v", k, phases, last)
	return last
}

func containers(t *testing.T, workspace string) []string {
	t.Helper()
	c, err := docker.New(docker.Options{Host: engineHost()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	list, err := c.List(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, l := range list {
		if strings.Contains(l.Name, workspace) {
			out = append(out, fmt.Sprint(l.Name, " ", l.State))
		}
	}
	return out
}

func sweep(t *testing.T, workspace string) {
	t.Helper()
	c, err := docker.New(docker.Options{Host: engineHost()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, name := range containers(t, workspace) {
		name, _, _ = strings.Cut(name, " ")
		t.Errorf("left behind: %s", name)
		if err := c.Remove(context.Background(), name); err != nil {
			t.Error(err)
		}
	}
}
