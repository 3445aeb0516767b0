package session

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// offered is a signer that can be made to fail when it should sign: the key is offered and no more.
type offered struct{ ssh.Signer }

var errOnlyOffered = errors.New("this key is only offered")

func (offered) Sign(io.Reader, []byte) (*ssh.Signature, error) { return nil, errOnlyOffered }

func (offered) SignWithAlgorithm(io.Reader, []byte, string) (*ssh.Signature, error) {
	return nil, errOnlyOffered
}

// forged offers one key and signs with another.
type forged struct {
	ssh.Signer
	with ssh.AlgorithmSigner
}

func (f forged) Sign(r io.Reader, data []byte) (*ssh.Signature, error) { return f.with.Sign(r, data) }

func (f forged) SignWithAlgorithm(r io.Reader, data []byte, algo string) (*ssh.Signature, error) {
	return f.with.SignWithAlgorithm(r, data, algo)
}

func freshKey(t *testing.T) ssh.Signer {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return signer
}

func (r *rig) lastLogin() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.logins) == 0 {
		return ""
	}
	return r.logins[len(r.logins)-1]
}

// TestAUTH06IdentityIsOfTheKeyThatSigned is also A19 (CVE-2024-45337).
func TestAUTH06IdentityIsOfTheKeyThatSigned(t *testing.T) {
	bo := freshKey(t)
	r := newRig(t, func(c *Config) { c.Keys = append(c.Keys, bo.PublicKey()) })
	ana := r.key
	// Ana's key signs; Bo's registered key is offered before (its signing fails on the client's side, so only the query was sent).
	client, err := r.dial("dev", ssh.PublicKeys(offered{bo}), ssh.PublicKeys(ana))
	if err == nil {
		client.Close()
	}
	client, err = r.dial("dev", ssh.PublicKeys(ana))
	r.must(err)
	defer client.Close()
	want := ssh.FingerprintSHA256(ana.PublicKey())
	eventually(t, 5*time.Second, "the identity is Ana's", func() bool { return r.lastLogin() == want })
	mallory := r.newKey("mallory")
	if c, err := r.dial("dev", ssh.PublicKeys(forged{bo, mallory.(ssh.AlgorithmSigner)})); err == nil {
		c.Close()
		t.Error("Bo's key with Mallory's signature was let in")
	}
	if got := r.lastLogin(); got != want {
		t.Errorf("after a forgery the last login is %s", got)
	}
	if c, err := r.dial("root", ssh.PublicKeys(ana)); err == nil {
		c.Close()
		t.Error("another login was let in")
	}
	for _, auth := range []ssh.AuthMethod{ssh.Password(""), ssh.Password("dev")} {
		if c, err := r.dial("dev", auth); err == nil {
			c.Close()
			t.Error("a password was let in")
		}
	}
}

func TestAUTH06TwentyKeys(t *testing.T) {
	r := newRig(t)
	var args []string
	for n := range 19 {
		name := "extra" + string(rune('a'+n))
		r.newKey(name)
		args = append(args, "-i", filepath.Join(r.dir, name))
	}
	config := filepath.Join(r.dir, "config")
	text, err := os.ReadFile(config)
	r.must(err)
	r.must(os.WriteFile(config, []byte(strings.Replace(string(text), "  IdentityFile "+r.dir+"/id\n", "", 1)), 0o600))
	last := append(append([]string{}, args...), "-i", filepath.Join(r.dir, "id"), "w1", "echo in")
	r.want(r.run(nil, "ssh", last...), "in\n", 0)
	r.newKey("onemore")
	r.newKey("andone")
	tooMany := append(append([]string{}, args...), "-i", filepath.Join(r.dir, "onemore"), "-i", filepath.Join(r.dir, "andone"), "-i", filepath.Join(r.dir, "id"), "w1", "echo in")
	if got := r.run(nil, "ssh", tooMany...); got.status != 255 || !strings.Contains(got.stderr, "too many authentication failures") {
		t.Errorf("%+v", got)
	}
}

func TestRemovedKeyEndsTheConnection(t *testing.T) {
	r := newRig(t)
	client := r.client()
	r.each(func(s *Server) { s.SetKeys(nil) })
	ended := make(chan error, 1)
	go func() { ended <- client.Wait() }()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("the connection goes on")
	}
}

func TestSlowHandshakeEnds(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Handshake = 200 * time.Millisecond })
	conn, err := net.Dial("unix", r.socket)
	r.must(err)
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.Copy(io.Discard, conn); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("a silent client was kept: %v", err)
	}
}

// a20 is the case's number of rejected channels, scaled down in short runs.
func a20() int {
	if testing.Short() {
		return 10000
	}
	return 100000
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// TestA20RejectedChannelsLeaveNothing: rejected channels and unsolicited replies pile up nothing (x/crypto advisories of 2026).
func TestA20RejectedChannelsLeaveNothing(t *testing.T) {
	r := newRig(t)
	client := r.client()
	r.must(func() error { s, err := client.NewSession(); r.must(err); return s.Run("true") }())
	before, routines := heap(), runtime.NumGoroutine()
	for range a20() {
		_, _, err := client.OpenChannel("no-such@carrel", nil)
		var open *ssh.OpenChannelError
		if !errors.As(err, &open) || open.Reason != ssh.UnknownChannelType {
			t.Fatalf("got %v", err)
		}
	}
	for range 10000 { // requests whose answer nobody asked for
		if _, _, err := client.SendRequest("keepalive@openssh.com", false, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := client.SendRequest("keepalive@openssh.com", true, nil); err != nil {
		t.Fatal(err)
	}
	if grown := int64(heap()) - int64(before); grown > 16<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	eventually(t, 5*time.Second, "no goroutine is stuck", func() bool { return runtime.NumGoroutine() <= routines+2 })
	s, err := client.NewSession()
	r.must(err)
	r.must(s.Run("true"))
}

func TestChannelsAreCapped(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Channels = 5 })
	client := r.client()
	for range 5 {
		_, reqs, err := client.OpenChannel("session", nil)
		r.must(err)
		go ssh.DiscardRequests(reqs)
	}
	_, _, err := client.OpenChannel("session", nil)
	var open *ssh.OpenChannelError
	if !errors.As(err, &open) || open.Reason != ssh.ResourceShortage || !strings.Contains(open.Message, "close some") {
		t.Errorf("got %v", err)
	}
}

func TestNoMoreSessions(t *testing.T) {
	r := newRig(t)
	client := r.client()
	_, _, err := client.SendRequest("no-more-sessions@openssh.com", true, nil)
	r.must(err)
	if _, err := client.NewSession(); err == nil {
		t.Error("a session was opened")
	}
	conn, err := client.Dial("tcp", echo(t, "tcp", "127.0.0.1:0").Addr().String())
	if err != nil {
		t.Fatalf("forwards still work: %v", err)
	}
	conn.Close()
}

// TestT28Rekey: bulk data both ways with a new key exchange every 256 KiB.
func TestT28Rekey(t *testing.T) {
	r := newRig(t)
	data := random(t, 32<<20)
	got := r.run(strings.NewReader(string(data)), "ssh", "-o", "RekeyLimit=256K", "w1", "cat")
	if got.stdout != string(data) {
		t.Errorf("%d bytes came back of %d; %s", len(got.stdout), len(data), got.stderr)
	}
}

// TestHostCertificate: a client that knows only the CA accepts the server, and not under another principal.
func TestHostCertificate(t *testing.T) {
	host, ca := freshKey(t), freshKey(t)
	cert := &ssh.Certificate{
		Key: host.PublicKey(), CertType: ssh.HostCert, ValidPrincipals: []string{"demo.carrel.w1"},
		ValidAfter: uint64(time.Now().Add(-time.Hour).Unix()), ValidBefore: uint64(time.Now().Add(time.Hour).Unix()),
	}
	if err := cert.SignCert(rand.Reader, ca); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *Config) { c.Signer, c.Certificate = host, cert })
	known := filepath.Join(r.dir, "ca-known")
	r.must(os.WriteFile(known, append([]byte("@cert-authority *.carrel.* "), ssh.MarshalAuthorizedKey(ca.PublicKey())...), 0o600))
	for alias, want := range map[string]int{"demo.carrel.w1": 0, "demo.carrel.w2": 255} {
		got := r.run(nil, "ssh", "-o", "UserKnownHostsFile="+known, "-o", "HostKeyAlias="+alias, "w1", "true")
		if got.status != want {
			t.Errorf("%s: %+v", alias, got)
		}
	}
}
