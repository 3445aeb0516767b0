package e2e

import (
	"crypto/tls"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestSiteOverTLS is a deployment as a site runs it: TLS with the gateway's own CA, which the sign-in link and the join token pin, an agent in
// a process of its own that joins, and ssh through both.
func TestSiteOverTLS(t *testing.T) {
	t.Parallel()
	l := &lab{t: t, state: t.TempDir(), procs: map[string]*process{}}
	if err := os.Chmod(l.state, 0o700); err != nil { //nolint:gosec // 0700 is what the gateway asks for
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	port := freePort(t)
	l.startGateway("0.0.0.0:"+port, "--public-url", "https://127.0.0.1:"+port)
	l.eventually("the gateway says its address", func() bool {
		url, err := os.ReadFile(filepath.Join(l.state, "url"))
		l.url = strings.TrimSpace(string(url))
		return err == nil
	})
	if !strings.HasPrefix(l.url, "https://") {
		t.Fatalf("the gateway serves at %s, want TLS", l.url)
	}
	l.eventually("the gateway speaks TLS", func() bool {
		conn, err := tls.Dial("tcp", "127.0.0.1:"+port, &tls.Config{MinVersion: tls.VersionTLS12})
		if err == nil {
			_ = conn.Close()
			t.Fatal("the gateway's certificate is trusted by this machine without its CA")
		}
		return strings.Contains(err.Error(), "certificate")
	})
	if res, err := http.Get("http://127.0.0.1:" + port + "/readyz"); err == nil { //nolint:noctx // short
		_ = res.Body.Close()
		if res.StatusCode == http.StatusOK {
			t.Error("plain HTTP is answered on an address that is not loopback")
		}
	}

	link := l.firstSignIn()
	bad := link[:len(link)-4] + "AAAA"
	stranger := &person{l: l, name: "stranger", home: t.TempDir()}
	stranger.config = filepath.Join(stranger.home, "ssh_config")
	if out, errs, code := stranger.run(nil, "login", bad); code == 0 {
		t.Errorf("a link with another CA fingerprint signs in:\n%s%s", out, errs)
	}
	l.admin = l.newPerson("admin", link)

	token := strings.TrimSpace(l.admin.ok("host", "token"))
	for field := range strings.FieldsSeq(token) {
		if strings.HasPrefix(field, "carrel-join.") {
			token = field
		}
	}
	l.startAgent(token)
	l.eventually("the host is ready", func() bool { return strings.Contains(l.admin.ok("host", "ls", "-o", "json"), `"ready"`) })
	l.admin.ok("up", "w1", "--image", testImage)
	if got := l.admin.sshOK("w1.carrel", "echo over TLS"); got != "over TLS\n" {
		t.Errorf("ssh says %q", got)
	}
	// The token was good once.
	second := filepath.Join(t.TempDir(), "second")
	out, errs, code := l.admin.program(nil, bin(t, "carreld"), "agent", "--data", second, "--name", "h2", "--gpus", "none", "--join", token)
	if code == 0 || strings.Contains(out, "joined") {
		t.Errorf("a join token is good twice: exit %d\n%s%s", code, out, errs)
	}
	// The agent comes back by itself, without the token.
	l.kill("agent", syscall.SIGKILL)
	l.startAgent("")
	l.eventually("the host is back", func() bool {
		return strings.Contains(l.admin.ok("host", "ls", "-o", "json"), `"ready"`) && l.admin.show("w1").UnreachableSince.IsZero()
	})
	if got := l.admin.sshOK("w1.carrel", "echo again"); got != "again\n" {
		t.Errorf("after the agent's restart ssh says %q", got)
	}
}

// TestAUTH09NeighboursReachNothing has a program of one workspace listen on all addresses, and another workspace look for it.
func TestAUTH09NeighboursReachNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	p := l.admin
	p.ok("up", "w1", "--image", testImage, "--gpu", "0")
	p.ok("up", "w2", "--image", testImage, "--gpu", "0")
	p.sshOK("w2.carrel", "cat > serve.py <<'END'\n"+strings.Replace(oneFileServer, "127.0.0.1", "0.0.0.0", 1)+"END\nsetsid -f python3 serve.py >/dev/null 2>&1 </dev/null; until [ -e ready ]; do sleep 0.1; done")
	address := strings.Fields(p.sshOK("w2.carrel", "hostname -I"))[0]
	if got := p.sshOK("w2.carrel", "curl -sS --max-time 10 http://"+address+":8123/"); got != "inside\n" {
		t.Fatalf("the server does not answer in its own workspace: %q", got)
	}
	out, errs, code := p.ssh(nil, "w1.carrel", "curl -sS --max-time 3 http://"+address+":8123/")
	if code == 0 {
		t.Errorf("the neighbour's server answers: %q %s", out, errs)
	}
}

// TestSSH26HostKeyStays compares host keys across stop and start and between workspaces.
func TestSSH26HostKeyStays(t *testing.T) {
	t.Parallel()
	l := newLab(t, true)
	p := l.admin
	p.ok("up", "w1", "--image", testImage, "--gpu", "0")
	p.ok("up", "w2", "--image", testImage, "--gpu", "0")
	first, second, other := hostKey(t, p, "w1"), "", hostKey(t, p, "w2")
	p.ok("stop", "w1")
	p.waitState("w1", "stopped")
	p.ok("start", "w1")
	second = hostKey(t, p, "w1")
	if first != second {
		t.Errorf("the host key changed: %s, then %s", first, second)
	}
	if first == other {
		t.Errorf("two workspaces have one host key: %s", first)
	}
}

// hostKey returns the fingerprint of the host key that ssh meets.
func hostKey(t *testing.T, p *person, name string) string {
	t.Helper()
	_, errs, code := p.ssh(nil, "-v", name+".carrel", "true")
	if code != 0 {
		t.Fatalf("ssh %s: exit %d\n%s", name, code, errs)
	}
	for line := range strings.SplitSeq(errs, "\n") {
		if _, rest, ok := strings.Cut(line, "Server host certificate: "); ok {
			return strings.Fields(rest)[1]
		}
	}
	t.Fatalf("ssh met no host certificate:\n%s", errs)
	return ""
}
