# Stands in for the official Kafka image: the same Kafka, as an ordinary user, configured by KAFKA_*.
FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home appuser && install -d -o appuser /var/lib/kafka/data
COPY libs/ /opt/kafka/libs/
COPY kafka-run.sh /etc/kafka/docker/run
USER 1000
VOLUME /var/lib/kafka/data
CMD ["/etc/kafka/docker/run"]
