package auth_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"math/big"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

func line(t *testing.T, public crypto.PublicKey) string {
	t.Helper()
	key, err := ssh.NewPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
}

// rsaKey has a modulus of so many bits; that nobody knows its factors is no matter for a public key.
func rsaKey(t *testing.T, bits int) string {
	t.Helper()
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), uint(bits-1)))
	if err != nil {
		t.Fatal(err)
	}
	n.SetBit(n, bits-1, 1).SetBit(n, 0, 1)
	return line(t, &rsa.PublicKey{N: n, E: 65537})
}

func TestDeviceKeysThatAreTaken(t *testing.T) {
	ed, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := map[string]string{
		"ed25519": line(t, ed), "rsa 3072": rsaKey(t, 3072), "rsa 4096": rsaKey(t, 4096),
		"hardware ed25519": "sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAIJjzc2a20RjCvN/0ibH6UpGuN9F9hDvD7x182bOesNhHAAAABHNzaDo=",
	}
	for _, curve := range []elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()} {
		key, err := ecdsa.GenerateKey(curve, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		good["ecdsa "+curve.Params().Name] = line(t, &key.PublicKey)
	}
	for name, text := range good {
		for _, form := range []string{text, text + " ana@laptop\n", "\n# comment\n" + text + " two words\n\n", text + "\r\n"} {
			authorized, fingerprint, err := auth.ParseDeviceKey(form)
			if err != nil || authorized != text || !strings.HasPrefix(fingerprint, "SHA256:") {
				t.Errorf("%s as %q: %q %q %v", name, form, authorized, fingerprint, err)
			}
		}
	}
}

func TestDeviceKeysThatAreRefused(t *testing.T) {
	ed, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := line(t, ed)
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert := &ssh.Certificate{Key: signer.PublicKey(), CertType: ssh.UserCert, ValidPrincipals: []string{"ana"}}
	if err := cert.SignCert(rand.Reader, signer); err != nil {
		t.Fatal(err)
	}
	one := big.NewInt(3)
	dss := "ssh-dss " + base64.StdEncoding.EncodeToString(ssh.Marshal(struct {
		Name       string
		P, Q, G, Y *big.Int
	}{"ssh-dss", one, one, one, one}))
	for name, c := range map[string]struct{ text, word string }{
		"empty":             {"", ".pub file"},
		"private key":       {"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----", ".pub file"},
		"cut":               {good[:40], ".pub file"},
		"a file's name":     {"~/.ssh/id_ed25519.pub", ".pub file"},
		"options":           {`command="x" ` + good, "without options"},
		"cert-authority":    {"cert-authority " + good, "without options"},
		"two keys":          {good + "\n" + good, "one SSH public key"},
		"key, then options": {good + "\ncommand=\"x\" " + good, "one SSH public key"},
		"rsa 2048":          {rsaKey(t, 2048), "3072"},
		"rsa 3071":          {rsaKey(t, 3071), "3072"},
		"dsa":               {dss, "key"},
		"certificate":       {string(ssh.MarshalAuthorizedKey(cert)), "ssh-keygen -t ed25519"},
	} {
		authorized, fingerprint, err := auth.ParseDeviceKey(c.text)
		if !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), c.word) || authorized != "" || fingerprint != "" {
			t.Errorf("%s: %q %v", name, authorized, err)
		}
	}
}

func FuzzParseDeviceKey(f *testing.F) {
	f.Add("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJjzc2a20RjCvN/0ibH6UpGuN9F9hDvD7x182bOesNhH x")
	f.Add("ssh-rsa AAAA")
	f.Fuzz(func(t *testing.T, text string) {
		authorized, fingerprint, err := auth.ParseDeviceKey(text)
		if err != nil {
			return
		}
		if strings.ContainsAny(authorized, "\r\n\"") || len(strings.Fields(authorized)) != 2 {
			t.Fatalf("%q would be more than a key in a file of keys", authorized)
		}
		if again, same, err := auth.ParseDeviceKey(authorized); err != nil || again != authorized || same != fingerprint {
			t.Fatalf("%q came back as %q, %v", authorized, again, err)
		}
	})
}
