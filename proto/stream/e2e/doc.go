// Package e2e holds the tests in which client, gateway and agent carry byte streams together.
package e2e
