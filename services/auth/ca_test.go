package auth_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/services/auth"
)

func hostCA(t *testing.T) *auth.HostCA {
	t.Helper()
	dir := keys(t, filepath.Join(t.TempDir(), "keys"))
	ca, err := dir.HostCA(sealer(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func parseKey(t *testing.T, text string) ssh.PublicKey {
	t.Helper()
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestHostCertificate(t *testing.T) {
	ca := hostCA(t)
	now := time.Now().Truncate(time.Second)
	sealed, err := ca.NewHostKey("w1")
	if err != nil {
		t.Fatal(err)
	}
	key, text, err := ca.HostIdentity(sealed, "w1", "demo.carrel.w1", now)
	if err != nil {
		t.Fatal(err)
	}
	cert, ok := parseKey(t, text).(*ssh.Certificate)
	if !ok {
		t.Fatal("no certificate")
	}
	signer, err := ssh.ParsePrivateKey(key)
	if err != nil || string(signer.PublicKey().Marshal()) != string(cert.Key.Marshal()) {
		t.Errorf("the certificate is not for the key: %v", err)
	}
	if cert.CertType != ssh.HostCert || len(cert.ValidPrincipals) != 1 || cert.ValidPrincipals[0] != "demo.carrel.w1" || len(cert.CriticalOptions) != 0 {
		t.Errorf("certificate %+v", cert)
	}
	if int64(cert.ValidAfter) != now.Add(-48*time.Hour).Unix() || int64(cert.ValidBefore) != now.Add(30*24*time.Hour).Unix() {
		t.Errorf("valid from %d to %d", cert.ValidAfter, cert.ValidBefore)
	}
	caKey := parseKey(t, ca.PublicKey())
	check := func(at time.Time, name string) error {
		checker := ssh.CertChecker{Clock: func() time.Time { return at }, IsHostAuthority: func(k ssh.PublicKey, _ string) bool {
			return string(k.Marshal()) == string(caKey.Marshal())
		}}
		return checker.CheckHostKey(name+":22", &net.TCPAddr{}, cert)
	}
	for _, c := range []struct {
		at   time.Time
		name string
		ok   bool
	}{
		{now, "demo.carrel.w1", true},
		{now.Add(-47 * time.Hour), "demo.carrel.w1", true}, // a laptop whose clock is behind
		{now.Add(-49 * time.Hour), "demo.carrel.w1", false},
		{now.Add(30*24*time.Hour - time.Second), "demo.carrel.w1", true},
		{now.Add(30*24*time.Hour + time.Second), "demo.carrel.w1", false},
		{now, "demo.carrel.w2", false},
		{now, "other.carrel.w1", false},
	} {
		if err := check(c.at, c.name); (err == nil) != c.ok {
			t.Errorf("%s as %s: %v", c.at, c.name, err)
		}
	}
	if _, _, err := ca.HostIdentity(sealed, "w2", "demo.carrel.w2", now); err == nil {
		t.Error("a host key opens for another workspace")
	}
}

// OpenSSH itself must read what we sign.
func TestHostCertificateAsOpenSSHReadsIt(t *testing.T) {
	ca := hostCA(t)
	sealed, err := ca.NewHostKey("w1")
	if err != nil {
		t.Fatal(err)
	}
	key, cert, err := ca.HostIdentity(sealed, "w1", "demo.carrel.w1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, content := range map[string]string{"key": string(key), "key-cert.pub": cert + "\n", "ca.pub": ca.PublicKey() + "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	keygen := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "ssh-keygen", args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("ssh-keygen %s: %v %s (Debian package openssh-client)", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	text := keygen("-L", "-f", "key-cert.pub")
	fingerprint := strings.Fields(keygen("-l", "-f", "ca.pub"))[1]
	for _, want := range []string{"ssh-ed25519-cert-v01@openssh.com host certificate", "Signing CA: ED25519 " + fingerprint, `Key ID: "demo.carrel.w1"`, "\n                demo.carrel.w1\n", "Critical Options: (none)"} {
		if !strings.Contains(text, want) {
			t.Errorf("ssh-keygen -L does not say %q:\n%s", want, text)
		}
	}
	if public := keygen("-y", "-f", "key"); !strings.HasPrefix(public, "ssh-ed25519 ") {
		t.Errorf("ssh-keygen -y: %s", public)
	}
}

func TestHostCAIsTheSameAfterARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	var all []string
	for range 2 {
		dir := keys(t, path)
		ca, err := dir.HostCA(sealer(t, dir))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, ca.PublicKey())
	}
	if all[0] != all[1] || strings.Contains(all[0], "\n") {
		t.Errorf("keys %q", all)
	}
	raw, err := os.ReadFile(filepath.Join(path, "ssh-host-ca"))
	if err != nil || strings.Contains(string(raw), "PRIVATE KEY") {
		t.Errorf("the CA's key lies open on disk: %v", err)
	}
}

func TestTLSCAIsPinnedByGoClients(t *testing.T) {
	dir := keys(t, filepath.Join(t.TempDir(), "keys"))
	ca, err := dir.TLSCA("lab", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	block, rest := pem.Decode(ca.PEM())
	if block == nil || block.Type != "CERTIFICATE" || len(rest) != 0 {
		t.Fatal("PEM is not one certificate")
	}
	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !parsed.IsCA || !parsed.MaxPathLenZero || parsed.KeyUsage&x509.KeyUsageCertSign == 0 || parsed.Subject.CommonName != "carrel CA of lab" {
		t.Errorf("CA %+v, %v", parsed.Subject, err)
	}
	sum := sha256.Sum256(block.Bytes)
	if ca.Fingerprint() != base64.RawURLEncoding.EncodeToString(sum[:]) {
		t.Error("the fingerprint is not SHA-256 over the certificate")
	}
	cert, err := ca.ServerCertificate([]string{"carrel.test", "127.0.0.1", "::1", ""}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if len(cert.Certificate) != 2 || string(cert.Certificate[1]) != string(block.Bytes) {
		t.Error("the chain does not hold the CA, so that a client cannot pin it")
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil || leaf.IsCA || time.Until(leaf.NotAfter) > 398*24*time.Hour {
		t.Errorf("leaf until %s, CA %t, %v", leaf.NotAfter, leaf.IsCA, err)
	}

	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ln) }()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	other, err := keys(t, filepath.Join(t.TempDir(), "keys")).TLSCA("lab", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what, name string
		roots      []byte
		ok         bool
	}{
		{"name", "carrel.test", ca.PEM(), true},
		{"address", "127.0.0.1", ca.PEM(), true},
		{"address 6", "::1", ca.PEM(), true},
		{"other name", "evil.test", ca.PEM(), false},
		{"other address", "127.0.0.2", ca.PEM(), false},
		{"another CA of the same name", "carrel.test", other.PEM(), false},
	} {
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(c.roots)
		dialer := tls.Dialer{Config: &tls.Config{RootCAs: pool, ServerName: c.name, MinVersion: tls.VersionTLS12}}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		conn, err := dialer.DialContext(ctx, "tcp", ln.Addr().String())
		cancel()
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.what, err)
		}
		if conn != nil {
			_ = conn.Close()
		}
	}
	again, err := dir.TLSCA("renamed", time.Now())
	if err != nil || again.Fingerprint() != ca.Fingerprint() {
		t.Errorf("another start made another CA: %v", err)
	}
}
