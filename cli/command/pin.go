package command

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/carrel-dev/carrel/cli/config"
)

// signInLink is what a link says: `https://HOST:PORT/#sign-in=CODE[.CA-FINGERPRINT]`.
type signInLink struct {
	gateway     string
	code        string
	fingerprint string // base64url SHA-256 of the CA certificate; empty for a public CA or plain http on loopback
}

// parseLink reads a link. Its text is a secret and stands in no message.
func parseLink(s string) (signInLink, error) {
	const form = "need the whole line `https://HOST:PORT/#sign-in=...` (in quotes, so that the shell keeps the #)"
	u, err := url.Parse(strings.TrimSpace(s))
	if err != nil {
		return signInLink{}, usagef("this is not a sign-in link: %s", form)
	}
	secret, ok := strings.CutPrefix(u.Fragment, "sign-in=")
	if !ok || secret == "" {
		return signInLink{}, usagef("this is not a sign-in link: %s", form)
	}
	u.Fragment = ""
	gateway, err := config.CheckGateway(u.String())
	if err != nil {
		return signInLink{}, usagef("sign-in link: %v", err)
	}
	code, fingerprint, _ := strings.Cut(secret, ".")
	if fingerprint != "" {
		raw, err := base64.RawURLEncoding.DecodeString(fingerprint)
		if err != nil || len(raw) != sha256.Size {
			return signInLink{}, usagef("sign-in link: the part behind the dot is not a fingerprint; copy the whole link")
		}
		if u.Scheme != "https" {
			return signInLink{}, usagef("sign-in link: it has a CA fingerprint but plain http")
		}
	}
	return signInLink{gateway: gateway, code: code, fingerprint: fingerprint}, nil
}

// pinnedCA fetches the gateway's own CA certificate: the one of its chain whose SHA-256 is the link's fingerprint.
//
// A handshake with ordinary verification is tried. It fails, since nobody here knows that CA yet, and no byte of the
// connection is used; the error holds the chain that was shown. The certificate in it that has the right hash is what
// the link's author vouched for, and becomes the only root of every connection from then on.
func (a *app) pinnedCA(ctx context.Context, link signInLink) ([]byte, error) {
	if link.fingerprint == "" {
		return nil, nil
	}
	want, err := base64.RawURLEncoding.DecodeString(link.fingerprint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, a.settings.Timeout.Request)
	defer cancel()
	chain, err := a.shownChain(ctx, link.gateway)
	if err != nil {
		return nil, failf(exitUnavailable, "gateway %s: %s", link.gateway, netReason(err))
	}
	for _, c := range chain {
		sum := sha256.Sum256(c.Raw)
		if string(sum[:]) == string(want) {
			return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}), nil
		}
	}
	return nil, failf(exitSignIn, "what answers at %s is not the gateway that the link was made by: none of its %d certificates has the link's fingerprint; nothing was sent to it", link.gateway, len(chain))
}

func (a *app) shownChain(ctx context.Context, gateway string) ([]*x509.Certificate, error) {
	t := a.newTransport(nil, a.settings.Timeout.Connect)
	defer t.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, gateway+"/", http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := t.RoundTrip(req)
	var refused *tls.CertificateVerificationError
	if errors.As(err, &refused) {
		return refused.UnverifiedCertificates, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<10)) // the answer itself means nothing here
	if resp.TLS == nil {
		return nil, fmt.Errorf("no TLS")
	}
	var chain []*x509.Certificate // verified by the system's roots: the root need not have been sent
	chain = append(chain, resp.TLS.PeerCertificates...)
	for _, verified := range resp.TLS.VerifiedChains {
		chain = append(chain, verified...)
	}
	return chain, nil
}

// newAPIWithCA makes clients of a deployment that may not be stored yet, without a token.
func (a *app) newAPIWithCA(dep config.Deployment, caPEM []byte) (*api, error) {
	plain := dep
	plain.CAFingerprint = "" // do not read it from a file
	c, err := a.newAPI(plain, "", a.settings.Timeout)
	if err != nil || caPEM == nil {
		return c, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(caPEM) {
		return nil, fmt.Errorf("the gateway's CA certificate is damaged")
	}
	c.tls.RootCAs = roots // before the first connection
	return c, nil
}
