package initlink_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// bulk is how many bytes one transfer moves.
const bulk = 256 << 20

// directSSHD is an OpenSSH server on loopback with the same client, key and cipher: what the figures are ratios to.
func (b *box) directSSHD(tb testing.TB) string {
	tb.Helper()
	b.must(os.MkdirAll("/run/sshd", 0o755)) // its privilege separation directory
	l, err := net.Listen("tcp", "127.0.0.1:0")
	b.must(err)
	_, port, err := net.SplitHostPort(l.Addr().String())
	b.must(err)
	l.Close()
	authorized := filepath.Join(b.dir, "authorized")
	b.must(os.WriteFile(authorized, ssh.MarshalAuthorizedKey(b.user.PublicKey()), 0o600))
	conf := filepath.Join(b.dir, "sshd_config")
	text := fmt.Sprintf("ListenAddress 127.0.0.1\nPort %s\nHostKey %s/host\nAuthorizedKeysFile %s\nStrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\nPrintMotd no\n", port, b.dir, authorized)
	b.must(os.WriteFile(conf, []byte(text), 0o600))
	sshd := exec.Command("/usr/sbin/sshd", "-D", "-e", "-f", conf)
	b.must(sshd.Start())
	tb.Cleanup(func() { _ = sshd.Process.Kill(); _ = sshd.Wait() })
	eventually(tb, 10*time.Second, "sshd listens", func() bool {
		c, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	config, err := os.ReadFile(filepath.Join(b.dir, "config"))
	b.must(err)
	client := fmt.Sprintf(`%s
Host fast.carrel
  User ana
  HostKeyAlias w
  IdentityFile %[2]s/id
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
  ProxyCommand env %[4]s=%[2]s/s %[5]s=1 %[6]s
  ProxyUseFdpass yes
  Ciphers aes128-gcm@openssh.com
Host direct
  HostName 127.0.0.1
  Port %[3]s
  User root
  IdentityFile %[2]s/id
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
  Ciphers aes128-gcm@openssh.com
`, config, b.dir, port, proxyEnv, fdpassEnv, os.Args[0])
	b.must(os.WriteFile(filepath.Join(b.dir, "config"), []byte(client), 0o600))
	return port
}

func (b *box) timed(tb testing.TB, host, cmd, stdin string) time.Duration {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "ssh", "-F", filepath.Join(b.dir, "config"), host, cmd)
	if stdin != "" {
		f, err := os.Open(stdin)
		b.must(err)
		defer f.Close()
		c.Stdin = f
	}
	var errs strings.Builder
	c.Stderr = &errs
	begin := time.Now()
	if err := c.Run(); err != nil {
		tb.Fatalf("%s %s: %v %s", host, cmd, err, errs.String())
	}
	return time.Since(begin)
}

func median(d []time.Duration) time.Duration {
	sort.Slice(d, func(i, j int) bool { return d[i] < d[j] })
	return d[len(d)/2]
}

// BenchmarkAgainstOpenSSH prints, per way of measuring, how many times as fast the workspace is as a direct sshd (above 1 is faster):
// through a plain ProxyCommand, and with the connection handed to ssh (fdpass). Rounds alternate, medians are compared.
func BenchmarkAgainstOpenSSH(b *testing.B) {
	box := newBox(b)
	box.directSSHD(b)
	file := filepath.Join(box.dir, "bulk")
	box.must(os.WriteFile(file, make([]byte, bulk), 0o600))
	for _, m := range []struct{ name, cmd, stdin string }{
		{"session", "true", ""}, {"up", "cat >/dev/null", file}, {"down", fmt.Sprintf("head -c %d /dev/zero", bulk), ""},
	} {
		b.Run(m.name, func(b *testing.B) {
			times := map[string][]time.Duration{}
			for range max(b.N, 5) {
				for _, host := range []string{"direct", "demo.carrel", "fast.carrel"} {
					times[host] = append(times[host], box.timed(b, host, m.cmd, m.stdin))
				}
			}
			direct := median(times["direct"])
			b.ReportMetric(float64(direct.Milliseconds()), "direct-ms")
			b.ReportMetric(float64(median(times["demo.carrel"]).Milliseconds()), "proxy-ms")
			b.ReportMetric(float64(median(times["fast.carrel"]).Milliseconds()), "fdpass-ms")
			b.ReportMetric(direct.Seconds()/median(times["demo.carrel"]).Seconds(), "x-proxy")
			b.ReportMetric(direct.Seconds()/median(times["fast.carrel"]).Seconds(), "x-fdpass")
		})
	}
}

// BenchmarkOpenStream is a stream from the pool to the SSH server's banner: the cost of a session process.
func BenchmarkOpenStream(b *testing.B) {
	box := newBox(b)
	for b.Loop() {
		conn, err := box.open()
		box.must(err)
		banner := make([]byte, 8)
		if _, err := conn.Read(banner); err != nil || string(banner) != "SSH-2.0-" {
			b.Fatalf("%q %v", banner, err)
		}
		conn.Close()
	}
}
