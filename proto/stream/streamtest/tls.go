// Package streamtest gives the tests of byte streams their certificates and their counts of what was left behind.
package streamtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"os"
	"runtime"
	"testing"
	"time"
)

// TLS makes a self-signed certificate for 127.0.0.1, localhost and gw.test,
// and returns the configuration of a TLS 1.3 server that shows it and of a
// client that trusts nothing else.
func TLS(tb testing.TB) (server, client *tls.Config) {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		DNSNames:     []string{"localhost", "gw.test"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:         true,

		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		tb.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	server = &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}
	return server, &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots}
}

// FDs returns the number of open file descriptors of this process.
func FDs(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(entries) - 1 // the one that reads the directory
}

// Settled waits until no more goroutines and file descriptors are there than
// at the start, and fails the test after 30 s.
func Settled(tb testing.TB, goroutines, fds int) {
	tb.Helper()
	Eventually(tb, "goroutines and descriptors back at the start", func() bool {
		return runtime.NumGoroutine() <= goroutines && FDs(tb) <= fds
	})
}

// Eventually polls until cond holds, and fails the test after 30 s.
func Eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			tb.Fatalf("not within 30 s: %s (goroutines %d, descriptors %d)", what, runtime.NumGoroutine(), FDs(tb))
		}
		time.Sleep(2 * time.Millisecond)
	}
}
