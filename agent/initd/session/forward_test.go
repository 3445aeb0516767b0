package session

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// echo answers what it is sent, on a listener of the test's.
func echo(t *testing.T, network, address string) net.Listener {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l
}

// exchange sends data, ends its side, and wants the same back, then the end.
func exchange(t *testing.T, conn net.Conn, data []byte) {
	t.Helper()
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	go func() {
		_, _ = conn.Write(data)
		_ = conn.(duplex).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(data), err)
	}
}

func random(t testing.TB, n int) []byte {
	t.Helper()
	data := make([]byte, n)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	return data
}

func TestSSH14DynamicForward(t *testing.T) {
	r := newRig(t)
	v4, v6 := echo(t, "tcp", "127.0.0.1:0"), echo(t, "tcp", "[::1]:0")
	port := freePort(t)
	hold, letGo := io.Pipe()
	cmd := r.command(t.Context(), "ssh", "-T", "-D", port, "w1", "bash")
	cmd.Stdin = hold
	var errs bytes.Buffer
	cmd.Stderr = &errs
	r.must(cmd.Start())
	defer func() { letGo.Close(); _ = cmd.Wait() }()
	eventually(t, 10*time.Second, "SOCKS listens", func() bool {
		c, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	portOf := func(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }
	for _, target := range []struct {
		host string
		port int
	}{{"127.0.0.1", portOf(v4)}, {"localhost", portOf(v4)}, {"localhost", portOf(v6)}, {"::1", portOf(v6)}} {
		conn, code := socks(t, port, target.host, target.port)
		if code != 0 {
			t.Errorf("%v: SOCKS reply %d", target, code)
			continue
		}
		exchange(t, conn, random(t, 1<<20))
	}
	begin := time.Now()
	conn, code := socks(t, port, "127.0.0.1", must(t, freePort(t)))
	conn.Close()
	if code == 0 || time.Since(begin) > 2*time.Second {
		t.Errorf("closed port: reply %d after %v", code, time.Since(begin))
	}
	if _, err := r.client().Dial("tcp", "127.0.0.1:"+freePort(t)); err == nil {
		t.Error("closed port was reached")
	} else if open := new(ssh.OpenChannelError); !errors.As(err, &open) || open.Reason != ssh.ConnectionFailed {
		t.Errorf("closed port: %v", err)
	}
}

func must(t *testing.T, port string) int {
	t.Helper()
	var n int
	if _, err := fmt.Sscan(port, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// socks asks a SOCKS5 server for a connection by name and gives its reply code (255: it hung up).
func socks(t *testing.T, proxy, host string, port int) (net.Conn, byte) {
	t.Helper()
	conn, err := net.Dial("tcp", "127.0.0.1:"+proxy)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	ask := append([]byte{5, 1, 0, 5, 1, 0, 3, byte(len(host))}, host...)
	if _, err := conn.Write(append(ask, byte(port>>8), byte(port))); err != nil {
		t.Fatal(err)
	}
	reply := make([]byte, 2+10)
	if _, err := io.ReadFull(conn, reply); err != nil {
		return conn, 255
	}
	_ = conn.SetDeadline(time.Time{})
	return conn, reply[3]
}

func TestSSH15UnixSocketForwards(t *testing.T) {
	r := newRig(t)
	echo(t, "unix", filepath.Join(r.home, "e.sock"))
	tcp := echo(t, "tcp", "127.0.0.1:0")
	local, remote := filepath.Join(r.dir, "l.sock"), filepath.Join(r.home, "r.sock")
	cmd := r.command(t.Context(), "ssh", "-N", "-L", local+":"+filepath.Join(r.home, "e.sock"), "-R", remote+":"+tcp.Addr().String(), "w1")
	r.must(cmd.Start())
	eventually(t, 10*time.Second, "both sockets are there", func() bool {
		_, err1 := os.Stat(local)
		_, err2 := os.Stat(remote)
		return err1 == nil && err2 == nil
	})
	for _, path := range []string{local, remote} {
		conn, err := net.Dial("unix", path)
		r.must(err)
		exchange(t, conn, random(t, 1<<20))
	}
	if info, err := os.Stat(remote); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket %v %v", info.Mode(), err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	eventually(t, 10*time.Second, "the socket is removed", func() bool { _, err := os.Stat(remote); return os.IsNotExist(err) })
	client := r.client()
	var open *ssh.OpenChannelError
	if _, err := client.Dial("unix", filepath.Join(r.home, "none.sock")); !errors.As(err, &open) || open.Reason != ssh.ConnectionFailed {
		t.Errorf("missing path: %v", err)
	}
	// A socket left by a killed server is taken over; a file that is no socket is not.
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: remote})
	r.must(err)
	old.SetUnlinkOnClose(false)
	old.Close()
	if l, err := client.ListenUnix(remote); err != nil {
		t.Errorf("stale socket: %v", err)
	} else {
		l.Close()
	}
	r.must(os.WriteFile(filepath.Join(r.home, "file"), []byte("x"), 0o644))
	if _, err := client.ListenUnix(filepath.Join(r.home, "file")); err == nil {
		t.Error("a file was replaced by a socket")
	}
}

func TestSSH17RemoteForwards(t *testing.T) {
	r := newRig(t)
	got := r.run(nil, "ssh", "-o", "LogLevel=INFO", "-R", "0:127.0.0.1:9", "w1", "true")
	if !strings.Contains(got.stderr, "Allocated port ") || strings.Contains(got.stderr, "Allocated port 0 ") {
		t.Errorf("%+v", got)
	}
	target, port := echo(t, "tcp", "127.0.0.1:0"), freePort(t)
	for range 2 {
		cmd := r.command(t.Context(), "ssh", "-N", "-o", "ExitOnForwardFailure=yes", "-R", port+":"+target.Addr().String(), "w1")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		r.must(cmd.Start())
		var conn net.Conn
		eventually(t, 10*time.Second, "the port listens", func() bool {
			var err error
			conn, err = net.Dial("tcp", "127.0.0.1:"+port)
			return err == nil
		})
		exchange(t, conn, random(t, 1<<20))
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		eventually(t, 10*time.Second, "the port is free", func() bool {
			c, err := net.Dial("tcp", "127.0.0.1:"+port)
			if err == nil {
				c.Close()
			}
			return err != nil
		})
	}
	// A port that is taken is refused.
	taken := echo(t, "tcp", "127.0.0.1:0")
	if _, err := r.client().Listen("tcp", taken.Addr().String()); err == nil {
		t.Error("a taken port was given out")
	}
}

func TestSSH27ManySessionsOnOneConnection(t *testing.T) {
	r := newRig(t)
	mux := filepath.Join(r.dir, "mux")
	master := r.command(t.Context(), "ssh", "-MN", "-S", mux, "w1")
	r.must(master.Start())
	defer func() { _ = master.Process.Kill(); _ = master.Wait() }()
	eventually(t, 10*time.Second, "the master is up", func() bool { _, err := os.Stat(mux); return err == nil })
	before := openFiles(t)
	var wg sync.WaitGroup
	for range 60 {
		wg.Go(func() {
			if got := r.run(nil, "ssh", "-S", mux, "w1", "sleep 2; echo ok"); got.stdout != "ok\n" || got.status != 0 {
				t.Errorf("%+v", got)
			}
		})
	}
	wg.Wait()
	for range 100 {
		r.want(r.run(nil, "ssh", "-S", mux, "w1", "true"), "", 0)
	}
	client := r.client()
	for range 400 {
		s, err := client.NewSession()
		r.must(err)
		r.must(s.Run("true"))
	}
	client.Close()
	eventually(t, 5*time.Second, "descriptors are back to where they were", func() bool { return openFiles(t) <= before })
}

func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func TestKeepAliveFindsADeadClient(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.KeepAlive, c.Limits.KeepAliveMisses = 50*time.Millisecond, 3 })
	client := r.client()
	_ = client
	got := r.ssh("sleep 1; echo alive")
	r.want(got, "alive\n", 0)
	conn, err := net.Dial("unix", r.socket)
	r.must(err)
	defer conn.Close()
	mute := &muted{Conn: conn}
	c, _, _, err := ssh.NewClientConn(mute, "w1", &ssh.ClientConfig{
		User: "dev", Auth: []ssh.AuthMethod{ssh.PublicKeys(r.key)}, HostKeyCallback: ssh.FixedHostKey(r.host.PublicKey()),
	})
	r.must(err)
	mute.stop(true)
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("a client that does not answer is kept for ever")
	}
}

// muted swallows what its side writes once stopped.
type muted struct {
	net.Conn
	mu   sync.Mutex
	mute bool
}

func (m *muted) stop(on bool) { m.mu.Lock(); m.mute = on; m.mu.Unlock() }

func (m *muted) Write(b []byte) (int, error) {
	m.mu.Lock()
	mute := m.mute
	m.mu.Unlock()
	if mute {
		return len(b), nil
	}
	return m.Conn.Write(b)
}

func TestForwardKeepsHalfClosedDirections(t *testing.T) {
	r := newRig(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		got, _ := io.ReadAll(c) // the client's end of file arrives while our direction is open
		_, _ = fmt.Fprintf(c, "%d bytes", len(got))
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err := r.client().DialContext(ctx, "tcp", l.Addr().String())
	r.must(err)
	_, err = conn.Write(make([]byte, 100000))
	r.must(err)
	r.must(conn.(interface{ CloseWrite() error }).CloseWrite())
	if got, err := io.ReadAll(conn); err != nil || string(got) != "100000 bytes" {
		t.Errorf("%q %v", got, err)
	}
}
