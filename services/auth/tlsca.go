package auth

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Lives of the deployment's own certificates: the CA is pinned by clients, so it lasts long; server certificates are made at each start.
const (
	tlsCALife     = 20 * 365 * 24 * time.Hour
	tlsServerLife = 397 * 24 * time.Hour // the longest that browsers take (CA/Browser Forum ballot 193's successor)
)

// TLSCA is the deployment's own certificate authority.
type TLSCA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// TLSCA returns the deployment's own CA, made at the first start; it lies in tls-ca.pem (certificate, then key).
func (d *KeyDir) TLSCA(deployment string, now time.Time) (*TLSCA, error) {
	content, err := d.load("tls-ca.pem", func() ([]byte, error) { return newTLSCA(deployment, now) })
	if err != nil {
		return nil, err
	}
	certBlock, rest := pem.Decode(content)
	keyBlock, _ := pem.Decode(rest)
	if certBlock == nil || keyBlock == nil {
		return nil, fleet.Errorf(fleet.KindInvalid, "tls-ca.pem does not hold a certificate and a key; put back the file from your backup")
	}
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read tls-ca.pem: %w", err)
	}
	key, err := x509.ParseECPrivateKey(keyBlock.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read tls-ca.pem: %w", err)
	}
	return &TLSCA{cert: cert, key: key, pem: pem.EncodeToMemory(certBlock)}, nil
}

// PEM returns the CA's certificate.
func (ca *TLSCA) PEM() []byte { return slices.Clone(ca.pem) }

// Fingerprint returns the SHA-256 of the CA's certificate (DER) in base64url, as it stands in sign-in links and join tokens.
func (ca *TLSCA) Fingerprint() string {
	sum := sha256.Sum256(ca.cert.Raw)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// ServerCertificate makes a server's certificate for names and addresses; the chain holds the CA too, so that a client can pin it.
func (ca *TLSCA) ServerCertificate(names []string, now time.Time) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := certificateTemplate("carrel gateway", now, tlsServerLife)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if name != "" {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make server certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: key}, nil
}

func newTLSCA(deployment string, now time.Time) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := certificateTemplate("carrel CA of "+deployment, now, tlsCALife)
	template.IsCA, template.BasicConstraintsValid, template.MaxPathLenZero = true, true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return append(content, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})...), nil
}

func certificateTemplate(name string, now time.Time, life time.Duration) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // crypto/rand does not fail (Go 1.24)
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-HostCertificateEarly), // as host certificates: for laptops whose clock is behind
		NotAfter:     now.Add(life),
	}
}
