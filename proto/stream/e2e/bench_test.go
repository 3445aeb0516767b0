package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/proto/stream/streamtest"
	"github.com/carrel-dev/carrel/services/tunnel"
)

const benchBytes = 256 << 20

// BenchmarkThroughput sends bytes client → gateway → agent → unix socket, all
// in this process, and prints the speed as a ratio to a plain loopback
// connection measured right before and after in the same run.
func BenchmarkThroughput(b *testing.B) {
	for _, secure := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "tls"}[secure], func(b *testing.B) {
			r := newRig(b, secure, tunnel.Options{})
			r.agent(1)
			r.expect("up h1 1")
			var direct, relayed time.Duration
			for b.Loop() {
				direct += push(b, loopback(b)) / 2
				relayed += push(b, r.mustDial("sink"))
				direct += push(b, loopback(b)) / 2
			}
			b.ReportMetric(float64(direct)/float64(relayed), "x-direct")
			b.ReportMetric(float64(b.N)*benchBytes/1e6/relayed.Seconds(), "MB/s")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkRoundTrip sends one byte there and back through all hops, and the
// same directly, in turns.
func BenchmarkRoundTrip(b *testing.B) {
	for _, secure := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "tls"}[secure], func(b *testing.B) {
			r := newRig(b, secure, tunnel.Options{})
			r.agent(1)
			r.expect("up h1 1")
			far, near := r.mustDial("echo"), loopbackEcho(b)
			defer far.Close()
			defer near.Close()
			var direct, relayed time.Duration
			one := []byte{1}
			bounce := func(c net.Conn) time.Duration {
				start := time.Now()
				if _, err := c.Write(one); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(c, one); err != nil {
					b.Fatal(err)
				}
				return time.Since(start)
			}
			for b.Loop() {
				direct += bounce(near)
				relayed += bounce(far)
			}
			b.ReportMetric(float64(relayed)/float64(direct), "x-direct")
			b.ReportMetric(float64(relayed.Microseconds())/float64(b.N), "us/trip")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func loopbackEcho(b *testing.B) net.Conn {
	return loopbackTo(b, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// loopback is a connection to a sink with nothing in between.
func loopback(b *testing.B) net.Conn {
	return loopbackTo(b, func(c net.Conn) {
		n, _ := io.Copy(struct{ io.Writer }{io.Discard}, c)
		_, _ = io.WriteString(c, strconv.FormatInt(n, 10))
	})
}

func loopbackTo(b *testing.B, f func(net.Conn)) net.Conn {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		defer l.Close()
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		f(c)
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	return c
}

var pushed = noise(3, 128<<10)

// push sends benchBytes and returns the time until the far end has counted them.
func push(b *testing.B, c net.Conn) time.Duration {
	b.Helper()
	defer c.Close()
	start := time.Now()
	for range benchBytes / len(pushed) {
		if _, err := c.Write(pushed); err != nil {
			b.Fatal(err)
		}
	}
	if err := c.(closeWriter).CloseWrite(); err != nil {
		b.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || string(got) != strconv.Itoa(benchBytes) {
		b.Fatalf("far end counted %q, %v", got, err)
	}
	return time.Since(start)
}

// BenchmarkIdleTunnel opens 1,000 tunnels through a gateway in a process of its
// own, which holds nothing but its side of them, and reports what it costs.
func BenchmarkIdleTunnel(b *testing.B) {
	for _, secure := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "tls"}[secure], func(b *testing.B) {
			for b.Loop() {
				cmd := exec.Command(os.Args[0], "-test.run=^TestIdleGateway$", "-test.v")
				cmd.Env = append(os.Environ(), "E2E_OWN=TestIdleGateway", "E2E_IDLE="+map[bool]string{false: "plain", true: "tls"}[secure])
				out, err := cmd.CombinedOutput()
				if err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				_, line, _ := strings.Cut(string(out), "idle: ")
				var kib, fds float64
				if _, err := fmt.Sscanf(line, "%f KiB %f fds", &kib, &fds); err != nil {
					b.Fatalf("%v in %s", err, out)
				}
				b.ReportMetric(kib, "KiB/tunnel")
				b.ReportMetric(fds, "fds/tunnel")
			}
		})
	}
}

// TestIdleGateway is the gateway of BenchmarkIdleTunnel: it joins 1,000 pairs
// of connections whose far ends are in child processes' hands, so that only
// the gateway's share of memory is this process's.
func TestIdleGateway(t *testing.T) {
	const tunnels = 1000
	secure := os.Getenv("E2E_IDLE") == "tls"
	if os.Getenv("E2E_FAR") != "" {
		farEnds(t, os.Getenv("E2E_FAR"), secure)
		return
	}
	if !inOwnProcess(t) {
		return
	}
	g := newIdleGateway(t, secure)
	// One tunnel first, so that what is paid once is paid.
	far := g.startFarEnds(t, 1)
	kibBefore, fdsBefore := resident(t), streamtest.FDs(t)
	far2 := g.startFarEnds(t, tunnels)
	kib := (resident(t) - kibBefore) / tunnels
	fds := float64(streamtest.FDs(t)-fdsBefore) / tunnels
	fmt.Printf("idle: %.2f KiB %.2f fds\n", kib, fds)
	far()
	far2()
	if fds > 2.05 {
		t.Errorf("an idle tunnel takes %.2f descriptors, more than 2", fds)
	}
	if limit := mostIdleKiB(secure); kib > limit {
		t.Errorf("an idle tunnel takes %.2f KiB, more than %v", kib, limit)
	}
}

// inOwnProcess runs the test once more in a fresh process, whose memory no
// other test has used, and is true there.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	if os.Getenv("E2E_OWN") == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=120s")
	cmd.Env = append(os.Environ(), "E2E_OWN="+t.Name())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Logf("%s", out)
	return false
}

// mostIdleKiB is 14 KiB where perf's target applies: plain, as built for use.
// crypto/tls keeps its record buffers, and the race detector its shadows.
func mostIdleKiB(secure bool) float64 {
	switch {
	case raceDetector:
		return 160
	case secure:
		return 48
	default:
		return 14
	}
}

// resident returns this process's anonymous memory in KiB with all garbage
// collected: what the kernel would report as its share, its stacks included.
func resident(tb testing.TB) float64 {
	tb.Helper()
	runtime.GC()
	debug.FreeOSMemory()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		tb.Fatal(err)
	}
	_, line, ok := strings.Cut(string(status), "RssAnon:")
	var kib float64
	if _, err := fmt.Sscan(line, &kib); !ok || err != nil {
		tb.Fatalf("no RssAnon: %v", err)
	}
	return kib
}
